/** The runs' curves: first those that every visit shows, others when they are looked at, new steps as they come. */

import { useLayoutEffect } from "preact/hooks";
import { address, atFirst, getJson } from "../api/client";
import { useResource } from "../api/resource";
import { inSnapshot } from "../api/snapshot";
import type { Series } from "../api/types";
import { appended, completed, portions } from "../maths/series";
import { boardError } from "./board";
import { FIRST, isFirst } from "./first";
import { createStore, useStore } from "./store";

/** Charts are some 300 pixels wide; the server puts the steps of a longer run together. */
const POINTS = 400;

const curves = createStore<Record<string, Series>>({});

/** What was asked for, by run. */
const asked: Record<string, Set<string>> = {};

/**
 * The curves of a run, as far as they are there.
 *
 * @param more names of metrics or columns beyond the usual ones
 */
export function useSeries(run: string, more: readonly string[] = []): Series | null {
  const known = useStore(curves)[run] ?? null;
  useLayoutEffect(() => void want(run, more), [run, more.join()]);
  return known;
}

const together = (series: Series): boolean => series.steps?.some(([first, last]) => first !== last) ?? false;

/**
 * The same curves with the steps that are zoomed in on apart, where the whole run has them put together.
 *
 * @param more as for useSeries
 */
export function useZoomed(run: string, series: Series | null, zoom: [number, number] | null, more: readonly string[]) {
  const names = [...new Set([...Object.keys(series?.metrics ?? {}), ...Object.keys(series?.rollups ?? {}), ...more])];
  const wanted = series && zoom && together(series);
  const steps = zoom ? `${Math.max(0, zoom[0])}-${Math.max(0, zoom[1])}` : undefined;
  const key = wanted ? [run, steps, ...names].join() : null;
  const near = useResource<Series>(key, series?.step.length, () => load(run, names, steps)).data;
  return (key && near) || series;
}

export function knownSeries(): Record<string, Series> {
  return curves.get();
}

/** Every metric that a run logged. */
export function metricNames(series: Series | null): string[] {
  return series?.names?.metrics ?? Object.keys(series?.metrics ?? {});
}

/** Every metric that a run logged, by Cavesson's name where the trainer has another one. */
export function alignedNames(series: Series | null): string[] {
  const called = series?.names?.called ?? {};
  const others = new Set(Object.values(called));
  return [...metricNames(series).filter((name) => !others.has(name)), ...Object.keys(called)];
}

/** Asks for the usual curves of a run before anything is drawn, once it is known which one. */
export function askEarly(run: Promise<string | undefined>): void {
  if (inSnapshot) return;
  const curves = run.then((name) => (name === undefined ? null : getJson(seriesAddress(name, FIRST))));
  atFirst(curves.catch(() => null)); // whoever asks again is told why
}

const seriesAddress = (run: string, names: readonly string[], steps?: string): string =>
  address(`runs/${run}/series`, { names: names.join(), steps, points: POINTS });

/** Asks for curves in so many requests that the server takes the names of each. */
async function load(run: string, names: readonly string[], steps?: string): Promise<Series> {
  const asked = portions(names).map((some) => getJson<Series>(seriesAddress(run, some, steps)));
  return (await Promise.all(asked)).reduce(completed);
}

async function want(run: string, more: readonly string[]): Promise<void> {
  const names = [...FIRST, ...more.filter((name) => !isFirst(name))].filter((name) => !asked[run]?.has(name));
  if (names.length === 0 || (inSnapshot && asked[run])) return;
  asked[run] = new Set([...(asked[run] ?? []), ...names]);
  const there = await take(run, names, (before, answer) => (before ? completed(before, answer) : answer));
  if (!there) for (const name of names) asked[run].delete(name); // asked for again by whoever wants them next
}

/** A step's metrics come after its rollouts, so the newest known steps are asked for again. */
const AGAIN = 20;

/** Takes in new steps, or all of them if the run was restarted. */
export async function growSeries(run: string, restarted: boolean): Promise<void> {
  const series = curves.get()[run];
  if (!series) return want(run, []);
  const again = series.step.at(-AGAIN) ?? series.step[0];
  const from = restarted || again === undefined || together(series) ? undefined : `${again}-999999999`;
  await take(run, [...asked[run]!], (before, answer) => (from && before ? appended(before, answer) : answer), from);
}

type Join = (before: Series | undefined, answer: Series) => Series;

/** Returns whether the answer came. */
async function take(run: string, names: string[], join: Join, steps?: string): Promise<boolean> {
  try {
    const whole = inSnapshot ? getJson<Series>(address(`runs/${run}/series`)) : load(run, names, steps);
    const answer = await whole;
    curves.set({ ...curves.get(), [run]: join(curves.get()[run], answer) });
    return true;
  } catch (error) {
    boardError.set(error instanceof Error ? error.message : String(error));
    return false;
  }
}
