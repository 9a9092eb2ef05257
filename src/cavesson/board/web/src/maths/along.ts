/** What a curve is drawn along: steps, or what the steps cost. */

import type { Series } from "../api/types";
import { clamp, type Maybe } from "./numbers";
import { aligned, pairs, placeOf } from "./series";

export const AXES = ["step", "tokens", "time", "kl"] as const;
export type Axis = (typeof AXES)[number];

const MINUTE = 60;

/**
 * Where each point of a run lies: its step; the response tokens sampled, or else the tokens trained on, or the minutes
 * spent, up to it; its KL to the reference. Null where that was not measured.
 */
export function placesAlong(series: Series, axis: Axis): Maybe[] {
  const { step, metrics, rollups } = series;
  if (axis === "step") return step;
  if (axis === "kl") return metrics["kl/objective"] ?? rollups["kl_k1"]?.mean ?? step.map(() => null);
  const sizes = pairs(series).map(([first, last]) => last - first + 1);
  if (axis === "tokens") {
    const length = rollups["length"];
    if (length) return summedUp(step.map((_, i) => product(length.count[i], length.mean[i])));
    return summedUp(step.map((_, i) => product(metrics["data/tokens"]?.[i], sizes[i])));
  }
  const seconds = metrics["time/total"] ?? metrics["time/step"];
  // A point may stand for several steps, of which the metric is the mean.
  const spent = summedUp(step.map((_, i) => product(seconds?.[i], sizes[i])));
  return spent.map((sum) => (sum === null ? null : sum / MINUTE));
}

function product(a: Maybe | undefined, b: Maybe | undefined): Maybe {
  return a == null || b == null ? null : a * b;
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

/** How the steps of a run lie along an axis, and back. */
export interface Along {
  at: (step: number) => number;
  stepAt: (place: number) => number;
}

/**
 * The places of all steps, from the points of the whole run that have one: between them, and beyond the last, on a
 * straight line, and nothing is spent one step before the first.
 */
export function along(series: Series, axis: Exclude<Axis, "kl">): Along {
  const places = placesAlong(series, axis);
  const known = series.step.flatMap((step, i) => (places[i] == null ? [] : [[step, places[i]!] as const]));
  if (axis === "step" || known.length === 0) return { at: (step) => step, stepAt: (place) => place };
  const steps = [known[0]![0] - 1, ...known.map(([step]) => step)];
  const spent = [0, ...known.map(([, place]) => place)];
  return { at: linear(steps, spent), stepAt: linear(spent, steps) };
}

/** The broken line through points with ascending x, drawn on beyond them. */
function linear(x: readonly number[], y: readonly number[]): (at: number) => number {
  return (at) => {
    const i = clamp(placeOf(x, at), 0, x.length - 2);
    const width = x[i + 1]! - x[i]!;
    return at === x[i + 1] || width === 0 ? y[i + 1]! : y[i]! + (y[i + 1]! - y[i]!) * ((at - x[i]!) / width);
  };
}
