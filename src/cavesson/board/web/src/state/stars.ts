/** Stars and notes: set at once on the page, kept by the server beside the run. */

import { forgetMatching, send } from "../api/client";
import { inSnapshot, snapshotStars } from "../api/snapshot";
import type { RolloutKey } from "../api/types";
import { boardError } from "./board";
import { createStore, useStore } from "./store";

/** null = no star, a text = starred with this note. Only what changed since the page was opened. */
export type Stars = Record<string, string | null>;

const changed = createStore<Stars>(snapshotStars());

/** For the export: answers that the page keeps may be older than its stars. */
export const changedStars = (): Stars => changed.get();

const starKey = (run: string, { step, sample }: RolloutKey): string => `${run}/${step}/${sample}`;

export function useStars(): Stars {
  return useStore(changed);
}

interface Starred extends RolloutKey {
  starred?: boolean;
  note?: string | null;
}

/** The note of a starred rollout, null where there is no star. */
export function starOf(stars: Stars, run: string, row: Starred): string | null {
  const key = starKey(run, row);
  return key in stars ? stars[key]! : row.starred ? (row.note ?? "") : null;
}

/** Returns whether the server has kept it. */
export async function setStar(run: string, place: RolloutKey, note: string | null): Promise<boolean> {
  const key = starKey(run, place);
  const before = changed.get()[key];
  changed.set({ ...changed.get(), [key]: note });
  const url = `api/runs/${run}/stars/${place.step}/${place.sample}`;
  try {
    await (note === null ? send("DELETE", url) : send("PUT", url, { note }));
    boardError.set(null);
    forgetMatching((known) => known.startsWith(`api/runs/${run}/`) && /starred=|\/stars/.test(known));
    return true;
  } catch (error) {
    const { [key]: _, ...others } = changed.get();
    changed.set(before === undefined ? others : { ...others, [key]: before });
    boardError.set(error instanceof Error ? error.message : String(error));
    return false;
  }
}

const last: Record<string, Starred> = {};

/** Remembers what the server said of a rollout, so that a key can toggle its star. */
export function noteStar(run: string, row: Starred): void {
  const { step, sample, starred = false, note = null } = row;
  last[starKey(run, row)] = { step, sample, starred, note };
}

/** Notes whose stars were taken away on this page: with the star they come back. */
const taken: Record<string, string> = {};

export async function toggleStar(run: string, place: RolloutKey): Promise<void> {
  if (inSnapshot) return;
  const key = starKey(run, place);
  const note = starOf(changed.get(), run, last[key] ?? place);
  if (note !== null) taken[key] = note;
  await setStar(run, place, note === null ? (taken[key] ?? "") : null);
}
