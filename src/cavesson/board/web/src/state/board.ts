/** The runs on the board, and which run and step are looked at. */

import { forget, getJson } from "../api/client";
import type { RunSummary } from "../api/types";
import { currentRoute, patchRoute, useRoute } from "./router";
import { neighbour, pairs } from "../maths/series";
import { growSeries, knownSeries } from "./series";
import { createStore, useStore } from "./store";

export const runs = createStore<RunSummary[] | null>(null);
export const boardError = createStore<string | null>(null);

/** Counts up for a run whenever it has grown. */
const versions = createStore<Record<number, number>>({});

let looks = 0;

/** Asks for the runs; of several answers on their way, only the last one that was asked for counts. */
export async function loadRuns(): Promise<void> {
  const look = ++looks;
  try {
    const found = await getJson<RunSummary[]>("api/runs");
    if (look !== looks) return;
    runs.set(found);
    boardError.set(null);
  } catch (error) {
    if (look === looks) boardError.set(error instanceof Error ? error.message : String(error));
  }
}

export function useVersion(run: number): number {
  return useStore(versions)[run] ?? 0;
}

/**
 * Takes in what was added to a run.
 *
 * @param restarted whether it was resumed or begun again, which may have replaced some of its steps
 */
export async function grow(run: number, restarted: boolean): Promise<void> {
  forget(run);
  await loadRuns();
  await growSeries(run, restarted);
  versions.set({ ...versions.get(), [run]: (versions.get()[run] ?? 0) + 1 });
}

export function useRun(): RunSummary {
  const { query } = useRoute();
  const all = useStore(runs)!;
  return all.find((run) => run.run === Number(query["run"] ?? 0)) ?? all[0]!;
}

/** The step looked at: the one in the address, else the run's newest, so that a live run is followed. */
export function useStep(): number {
  const run = useRun();
  const { query } = useRoute();
  return query["step"] === undefined ? newestStep(run) : Number(query["step"]);
}

const newestStep = (run: RunSummary): number => run.newest ?? run.steps?.[1] ?? 0;

export function selectStep(step: number | undefined): void {
  patchRoute({ step, sample: undefined, from: undefined, read: undefined }, true);
}

/** Moves to the next or previous recorded step. */
export function moveStep(by: number): void {
  const run = (runs.get() ?? []).find((known) => known.run === Number(currentRoute().query["run"] ?? 0));
  const series = run && knownSeries()[run.run];
  if (!run || !series?.step.length) return;
  const at = currentRoute().query["step"];
  selectStep(neighbour(pairs(series), at === undefined ? newestStep(run) : Number(at), by));
}
