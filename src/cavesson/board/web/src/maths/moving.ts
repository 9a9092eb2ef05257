/** Which curves change, and which keep one number. */

import { finite, type Maybe } from "./numbers";

/** Curves that differ by less than this share of their size keep the digits that a chart shows. */
const SAME = 1e-3;

/** Fewer points do not tell whether a curve rests. */
const ENOUGH = 5;

/** The number that a curve keeps; null if it changes, or has too few points to say so. */
export function constant(values: readonly Maybe[]): number | null {
  const measured = finite(values);
  if (measured.length < ENOUGH) return null;
  const [low, high] = measured.reduce(([a, b], value) => [Math.min(a!, value), Math.max(b!, value)], [
    Infinity,
    -Infinity,
  ] as number[]) as [number, number];
  const size = Math.max(Math.abs(low), Math.abs(high));
  return high - low <= SAME * size ? measured.at(-1)! : null;
}

/** Charts that change, and those in which no curve does, both in the order given. */
export function divided<C>(charts: readonly C[], curvesOf: (chart: C) => (readonly Maybe[])[]): [C[], C[]] {
  const rests = charts.map((chart) => curvesOf(chart).every((values) => constant(values) !== null));
  return [charts.filter((_, i) => !rests[i]), charts.filter((_, i) => rests[i])];
}
