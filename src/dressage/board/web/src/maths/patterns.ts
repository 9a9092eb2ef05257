/** Which patterns tell something beside others. */

import type { Pattern } from "../api/types";

/** Letters of alphabets, which follow their words and tell nothing beside them. */
const LETTER = /^(?=\p{L})[^\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}]\p{M}*$/u;

/** Among all kinds once what is a word and a character alike, such as a sign that stands alone, and no single letters. */
export function telling(patterns: Pattern[], kind: string): Pattern[] {
  if (kind !== "all") return patterns;
  const seen = new Set<string>();
  return patterns.filter(({ text, kind: own }) => {
    if (seen.has(text) || (own === "character" && LETTER.test(text))) return false;
    return seen.add(text);
  });
}
