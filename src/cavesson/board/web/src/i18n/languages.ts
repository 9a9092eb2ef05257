/** The languages of the page. */

export const LANGUAGES = { en: "English", zh: "中文", vi: "Tiếng Việt" } as const;
export type Language = keyof typeof LANGUAGES;

export const isLanguage = (text: string): text is Language => text in LANGUAGES;

/** The first of the browser's languages that the page speaks. */
export function preferred(languages: readonly string[]): Language {
  return languages.map((tag) => tag.slice(0, 2).toLowerCase()).find(isLanguage) ?? "en";
}
