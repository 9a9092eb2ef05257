/** The page's own words in three languages; what a run contains is never translated. */

import { loadScript } from "../api/script";
import { preference } from "../state/preferences";
import { useStore } from "../state/store";
import { dictionaries, type Key } from "./dictionaries";
import { en } from "./en";
import { isLanguage, type Language, LANGUAGES, preferred } from "./languages";
import { translate } from "./translate";

export type { Dictionary, Key } from "./dictionaries";
export { LANGUAGES, type Language } from "./languages";

export type Translate = (key: Key, values?: Record<string, string | number>) => string;

export const language = preference<Language>("language", preferred(navigator.languages), isLanguage);

/** Loads the words of a language; without the server the page stays as it is. */
export async function loadWords(of: Language): Promise<boolean> {
  return of === "en" || dictionaries[of] !== undefined || (await loadScript(`${of}.js`));
}

/** Loads the other languages, which can then be chosen without the server, too. */
export function loadOtherWords(): void {
  for (const other of Object.keys(LANGUAGES) as Language[]) void loadWords(other);
}

/** Changes the language of the page once its words are there. */
export async function speak(next: Language): Promise<void> {
  if (await loadWords(next)) language.set(next);
}

export function useText(): Translate {
  const chosen = useStore(language);
  return (key, values) => translate(dictionaries[chosen] ?? en, key, values);
}
