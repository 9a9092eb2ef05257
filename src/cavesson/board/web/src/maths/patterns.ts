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

/** Curves that are nowhere further apart than this share of the tallest look like one. */
const APART = 1 / 400;

/** The first so many curves, each with all patterns whose curves would be drawn on top of it. */
export function lines(patterns: Pattern[], most: number): Pattern[][] {
  const shares = patterns.flatMap(({ share }) => share.map((one) => one ?? 0));
  const near = APART * Math.max(0.05, ...shares);
  const found: Pattern[][] = [];
  for (const pattern of patterns) {
    const line = found.find(([first]) => coincide(first!.share, pattern.share, near));
    if (line) line.push(pattern);
    else if (found.length < most) found.push([pattern]);
  }
  return found;
}

function coincide(a: readonly (number | null)[], b: readonly (number | null)[], near: number): boolean {
  const same = (one: number | null, other: number | null): boolean =>
    one === null || other === null ? one === other : Math.abs(one - other) <= near;
  return a.length === b.length && a.every((one, i) => same(one, b[i] ?? null));
}
