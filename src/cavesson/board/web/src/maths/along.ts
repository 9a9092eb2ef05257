/** What a curve is drawn along: steps, or what the steps cost. */

import type { Series } from "../api/types";
import type { Maybe } from "./numbers";
import { aligned, pairs } from "./series";

export const AXES = ["step", "tokens", "time", "kl"] as const;
export type Axis = (typeof AXES)[number];

/** Metrics that the axes need, beyond those that are always there. */
export const OF_AXES = ["time/total", "time/step"];

const MINUTE = 60;

/**
 * Where each point of a run lies: its step; the response tokens trained on, or the minutes spent, up to it; its KL to
 * the reference. Null where that was not measured.
 */
export function placesAlong(series: Series, axis: Axis): Maybe[] {
  const { step, metrics, rollups } = series;
  if (axis === "step") return step;
  if (axis === "kl") return metrics["kl/objective"] ?? rollups["kl_k1"]?.mean ?? step.map(() => null);
  if (axis === "tokens") {
    const { count, mean } = rollups["length"] ?? { count: [], mean: [] };
    return summedUp(step.map((_, i) => (count[i] == null || mean[i] == null ? null : count[i]! * mean[i]!)));
  }
  const seconds = metrics["time/total"] ?? metrics["time/step"] ?? [];
  // A point may stand for several steps, of which the metric is the mean.
  return summedUp(
    pairs(series).map(([first, last], i) => (seconds[i] == null ? null : (seconds[i]! * (last - first + 1)) / MINUTE)),
  );
}

function summedUp(values: Maybe[]): Maybe[] {
  let sum = 0;
  return values.map((value) => (value === null ? null : (sum += value)));
}

export const hasAxis = (series: Series, axis: Axis): boolean =>
  placesAlong(series, axis).some((place) => place !== null);

/** Curves of several runs over all places that any of them has, in ascending order. */
export function laidOver(curves: { places: Maybe[]; values: Maybe[] }[]): { x: number[]; values: Maybe[][] } {
  const known = curves.map(({ places, values }) => {
    const there = places.flatMap((place, i) => (place === null ? [] : [[place, values[i] ?? null] as const]));
    return { places: there.map(([place]) => place), values: there.map(([, value]) => value) };
  });
  const x = [...new Set(known.flatMap(({ places }) => places))].sort((a, b) => a - b);
  return { x, values: known.map(({ places, values }) => aligned(x, places, values)) };
}
