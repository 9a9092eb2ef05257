/** Fills values into the words of a dictionary. */

import type { Dictionary, Key } from "./dictionaries";

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
