/** The range of a vertical axis, which a few outliers do not flatten. */

import { finite, type Maybe, usualRange } from "./numbers";

/** The usual values get the whole axis if they would fill less than this share of it. */
const FLAT = 0.2;
/** Share of the values that may lie beyond the axis; more of them are no outliers. */
const MOST = 0.2;

export interface Height {
  /** of the values that are drawn */
  usual: Range;
  /** of all values; the same where nothing lies beyond the axis */
  whole: Range;
  /** what lies outside the usual range */
  beyond: Beyond | null;
}

export type Range = [low: number, high: number];

export interface Beyond {
  count: number;
  /** the lowest of all values, if it is below the usual range */
  lowest: number | null;
  highest: number | null;
}

/**
 * The range that shows how curves usually move, with a little room, and what lies beyond it; null if nothing is measured.
 *
 * A value is usual if it is within three interquartile ranges of the quartiles of its curve (Tukey 1977). All values
 * count as usual unless those that are would fill less than a fifth of the axis, and are at least four fifths of all.
 */
export function heightOf(curves: readonly (readonly Maybe[])[]): Height | null {
  const measured = curves.map(finite).filter((values) => values.length > 0);
  if (measured.length === 0) return null;
  const all = measured.flatMap((values) => [...values]);
  const [whole, usual] = [extremes(all), extremes(measured.flatMap(usualRange))];
  const isFlat = usual[1] - usual[0] < FLAT * (whole[1] - whole[0]);
  const [low, high] = roomy(usual);
  const outside = all.filter((value) => value < low || value > high);
  if (outside.length === 0 || !isFlat || outside.length > MOST * all.length)
    return { usual: roomy(whole), whole: roomy(whole), beyond: null };
  const [lowest, highest] = [whole[0] < low ? whole[0] : null, whole[1] > high ? whole[1] : null];
  return { usual: [low, high], whole: roomy(whole), beyond: { count: outside.length, lowest, highest } };
}

/** A constant gets room around it. */
function roomy([low, high]: Range): Range {
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

function extremes(values: readonly number[]): Range {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}
