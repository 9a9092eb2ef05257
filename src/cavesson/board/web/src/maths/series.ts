/** A run's curves, put together as they arrive. */

import type { Rollup, Series } from "../api/types";
import type { Maybe } from "./numbers";

/** `later` replaces what `earlier` has from its first step on; what only one of them has is null in the other. */
export function appended(earlier: Series, later: Series): Series {
  const from = later.step[0];
  const before = from === undefined ? earlier.step.length : earlier.step.filter((step) => step < from).length;
  const after = later.step.length;
  const join: Join = (a, b) => [
    ...(a?.slice(0, before) ?? Array<null>(before).fill(null)),
    ...(b ?? Array<null>(after).fill(null)),
  ];
  const metrics: Series["metrics"] = {};
  for (const name of names(earlier.metrics, later.metrics)) {
    metrics[name] = join(earlier.metrics[name], later.metrics[name]);
  }
  const rollups: Series["rollups"] = {};
  for (const name of names(earlier.rollups, later.rollups)) {
    rollups[name] = joinRollups(earlier.rollups[name], later.rollups[name], join);
  }
  return {
    ...later,
    step: [...earlier.step.slice(0, before), ...later.step],
    steps: [...pairs(earlier).slice(0, before), ...pairs(later)],
    metrics,
    rollups,
  };
}

/** Further curves of the same run; curves asked for before it grew end earlier. */
export function completed(known: Series, more: Series): Series {
  const longest = known.step.length > more.step.length ? known : more;
  const empty: Series = { ...longest, metrics: {}, rollups: {} };
  const [a, b] = [stretched(known, empty), stretched(more, empty)];
  return { ...longest, metrics: { ...a.metrics, ...b.metrics }, rollups: { ...a.rollups, ...b.rollups } };
}

/** The series with the steps of a longer one, null where it has none. */
function stretched(series: Series, longer: Series): Series {
  if (series.step.length === longer.step.length) return series;
  const from = series.step.length;
  return appended(series, { ...longer, step: longer.step.slice(from), steps: pairs(longer).slice(from) });
}

/** The server takes 20,000 characters of names, and an address may have some more when they are escaped. */
const CHARACTERS = 10_000;

/** Names in lists whose characters are few enough for one request. */
export function portions(names: readonly string[]): string[][] {
  const lists: string[][] = [[]];
  let characters = 0;
  for (const name of names) {
    characters += name.length + 1;
    if (characters > CHARACTERS && lists.at(-1)!.length > 0) {
      lists.push([]);
      characters = name.length + 1;
    }
    lists.at(-1)!.push(name);
  }
  return lists;
}

export function pairs(series: Series): [number, number][] {
  return series.steps ?? series.step.map((step) => [step, step]);
}

type Join = (a: Maybe[] | undefined, b: Maybe[] | undefined) => Maybe[];

function joinRollups(a: Rollup | undefined, b: Rollup | undefined, join: Join): Rollup {
  const keys = Object.keys(a ?? b ?? {}) as (keyof Rollup)[];
  return Object.fromEntries(keys.map((key) => [key, join(a?.[key], b?.[key])])) as unknown as Rollup;
}

function names(a: object, b: object): string[] {
  return [...new Set([...Object.keys(a), ...Object.keys(b)])];
}

/** The values of one series at the steps of another list; null where that step is missing. */
export function aligned(steps: readonly number[], from: readonly number[], values: readonly Maybe[]): Maybe[] {
  const known = new Map(from.map((step, i) => [step, values[i] ?? null]));
  return steps.map((step) => known.get(step) ?? null);
}

/** The place of the point that a step belongs to: of a long run a point stands for several steps. */
export function placeOf(first: readonly number[], step: number): number {
  let [low, high] = [0, first.length];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (first[middle]! <= step) low = middle;
    else high = middle;
  }
  return low;
}

type Pair = readonly [first: number, last: number];

/** The recorded step that is nearest to a value; between the ends of a point all steps count as recorded. */
export function nearestStep(points: readonly Pair[], value: number): number {
  const step = Math.round(value);
  let best = points[0]?.[0] ?? 0;
  for (const [first, last] of points) {
    const near = Math.min(last, Math.max(first, step));
    if (Math.abs(near - step) < Math.abs(best - step)) best = near;
  }
  return best;
}

/** The recorded step before (−1) or after (1) a step; the same where there is none; ±∞ for the ends. */
export function neighbour(points: readonly Pair[], step: number, by: number): number {
  const [start, end] = [points[0]?.[0] ?? step, points[points.length - 1]?.[1] ?? step];
  if (by === Infinity) return end;
  if (by === -Infinity) return start;
  const wanted = step + by;
  if (points.some(([first, last]) => wanted >= first && wanted <= last)) return wanted;
  if (by > 0) return points.find(([first]) => first > step)?.[0] ?? end;
  return points.findLast(([, last]) => last < step)?.[1] ?? start;
}
