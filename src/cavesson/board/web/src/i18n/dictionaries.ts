/** The dictionaries that are there. The page contains English; each other language is a script, which is loaded later. */

import type { en } from "./en";
import type { Language } from "./languages";

export type Key = keyof typeof en;
export type Dictionary = Record<Key, string>;

declare global {
  var cavessonDictionaries: Partial<Record<Language, Dictionary>> | undefined;
}

export const dictionaries = (globalThis.cavessonDictionaries ??= {});
