/** Which patterns have the same curve. */

import type { Pattern } from "../api/types";

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
