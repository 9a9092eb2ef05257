/** The runs on the board, and which run and step are looked at. */

import { forget, forgetMatching, getJson } from "../api/client";
import type { RunSummary } from "../api/types";
import { useEffect, useState } from "preact/hooks";
import { address } from "../api/client";
import { inSnapshot } from "../api/snapshot";
import { currentRoute, patchRoute, type Route, tabRoute, useRoute, type View } from "./router";
import { neighbour, pairs } from "../maths/series";
import { parsePlace } from "../maths/sides-of-prompt";
import { growSeries, knownSeries } from "./series";
import { createStore, useStore } from "./store";

export const runs = createStore<RunSummary[] | null>(null);
export const boardError = createStore<string | null>(null);

/** Counts up for a run whenever it has grown. */
const versions = createStore<Record<string, number>>({});

/** Counts up with every look at the list of runs. */
export const listings = createStore(0);

const OF_ALL = ["api/runs", "api/table"];

let looks = 0;

/** Asks for the runs; of several answers on their way, only the last one that was asked for counts. */
export async function loadRuns(): Promise<void> {
  const look = ++looks;
  if (look > 1) forgetMatching((url) => OF_ALL.includes(url));
  try {
    const found = await getJson<RunSummary[]>("api/runs");
    if (look !== looks) return;
    runs.set(found);
    listings.set(look);
    boardError.set(null);
  } catch (error) {
    if (look === looks) boardError.set(error instanceof Error ? error.message : String(error));
  }
}

export function useVersion(run: string): number {
  return useStore(versions)[run] ?? 0;
}

/**
 * Takes in what was added to a run.
 *
 * @param restarted whether it was resumed or begun again, which may have replaced some of its steps
 */
export async function grow(run: string, restarted: boolean): Promise<void> {
  forget(run);
  await loadRuns();
  await growSeries(run, restarted);
  versions.set({ ...versions.get(), [run]: (versions.get()[run] ?? 0) + 1 });
}

/** Opens runs of a folder that nobody has looked at, so that more is known of them. Returns why one cannot be opened. */
export function useOpened(names: string[]): string | null {
  const all = useStore(runs)!;
  const [failed, fail] = useState<string | null>(null);
  const closed = names.filter((name) => all.some(({ run, opened }) => run === name && opened === false));
  useEffect(() => {
    fail(null);
    if (closed.length === 0 || inSnapshot) return;
    void Promise.all(closed.map((name) => getJson<RunSummary>(address(`runs/${name}`)))).then(
      (found) => {
        const known = new Map(found.map((run) => [run.run, run]));
        runs.set(runs.get()!.map((run) => known.get(run.run) ?? run));
      },
      (error: unknown) => fail(error instanceof Error ? error.message : String(error)),
    );
  }, [closed.join()]);
  return failed;
}

export function useRun(): RunSummary {
  const { query } = useRoute();
  const all = useStore(runs)!;
  return all.find((run) => run.run === query["run"]) ?? all[0]!;
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

/** What a reader has chosen on *Responses*. */
const CHOICES = ["sort", "scope", "steps", "filter", "q", "starred", "at"];

/** Where the tokens of a response are; the choice of metrics stays from one response to the next. */
export function tokensRoute(run: string, step: number, sample: number, token: number | null = null): Route {
  const { token: _, ...kept } = tabRoute("tokens").query;
  const place = { run, step: String(step), sample: String(sample) };
  return { view: "tokens", query: { ...kept, ...place, ...(token === null ? {} : { token: String(token) }) } };
}

/**
 * Where a view's tab leads: to the tokens of the response that is open on *Responses*, and to the newest responses of a
 * run in training, the best first, until others were chosen.
 */
export function viewRoute(view: View, run: RunSummary): Route {
  const { query } = tabRoute(view);
  const open = currentRoute().view === "responses" ? parsePlace(currentRoute().query["at"]) : null;
  if (view === "tokens" && open) return tokensRoute(run.run, open.step, open.sample);
  const newest = view === "responses" && run.live && !CHOICES.some((key) => key in query);
  return { view, query: newest ? { ...query, scope: "step", sort: "-reward" } : query };
}

/** Moves to the next or previous recorded step. */
export function moveStep(by: number): void {
  const known = runs.get() ?? [];
  const run = known.find((one) => one.run === currentRoute().query["run"]) ?? known[0];
  const series = run && knownSeries()[run.run];
  if (!run || !series?.step.length) return;
  const at = currentRoute().query["step"];
  selectStep(neighbour(pairs(series), at === undefined ? newestStep(run) : Number(at), by));
}
