/** The libraries for Markdown and LaTeX: a separate script, larger than the page, loaded on demand. */

import { Marked } from "marked";
import temml from "temml";

const libraries = { Marked, temml };

export type Libraries = typeof libraries;

declare global {
  var cavessonMarkdown: Libraries | undefined;
}

globalThis.cavessonMarkdown = libraries;
