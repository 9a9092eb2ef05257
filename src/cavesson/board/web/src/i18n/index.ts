/** The page's own words in three languages; what a run contains is never translated. */

import { preference } from "../state/preferences";
import { useStore } from "../state/store";
import { DICTIONARIES, isLanguage, type Key, type Language, preferred, translate } from "./translate";

export { type Dictionary, type Key, LANGUAGES, type Language } from "./translate";

export type Translate = (key: Key, values?: Record<string, string | number>) => string;

export const language = preference<Language>("language", preferred(navigator.languages), isLanguage);

export function useText(): Translate {
  const chosen = useStore(language);
  return (key, values) => translate(DICTIONARIES[chosen], key, values);
}
