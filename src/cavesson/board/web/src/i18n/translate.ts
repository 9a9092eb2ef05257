/** Words by key, in the languages there are. */

import { en } from "./en";
import { vi } from "./vi";
import { zh } from "./zh";

export type Key = keyof typeof en;
export type Dictionary = Record<Key, string>;

export const LANGUAGES = { en: "English", zh: "中文", vi: "Tiếng Việt" } as const;
export type Language = keyof typeof LANGUAGES;

export const DICTIONARIES: Record<Language, Dictionary> = { en, zh, vi };

export const isLanguage = (text: string): text is Language => text in LANGUAGES;

/** The first of the browser's languages that the page speaks. */
export function preferred(languages: readonly string[]): Language {
  return languages.map((tag) => tag.slice(0, 2).toLowerCase()).find(isLanguage) ?? "en";
}

/** The text of a key, with {name} replaced by its value, and {name:one|many} by the word that fits this number. */
export function translate(dictionary: Dictionary, key: Key, values: Record<string, string | number> = {}): string {
  return dictionary[key].replace(
    /\{(\w+)(?::([^|{}]+)\|([^|{}]+))?\}/g,
    (whole, name: string, one?: string, many?: string) => {
      const value = String(values[name] ?? whole);
      return one === undefined ? value : String(value === "1" ? one : many);
    },
  );
}
