/** The libraries for Markdown and LaTeX: a script of its own, larger than the page, loaded when they are asked for. */

import { Marked } from "marked";
import temml from "temml";

const libraries = { Marked, temml };

export type Libraries = typeof libraries;

declare global {
  var cavessonMarkdown: Libraries | undefined;
}

globalThis.cavessonMarkdown = libraries;
