/** Labels of rollouts: set at once on the page, kept by the server beside the run. */

import { forgetMatching, send } from "../api/client";
import { inSnapshot, snapshotLabels } from "../api/snapshot";
import type { Label, Labelled, RolloutKey } from "../api/types";
import { boardError } from "./board";
import { preference } from "./preferences";
import { createStore, useStore } from "./store";

/** All labels of the rollouts whose labels changed since the page was opened. */
export type Labels = Record<string, Label[]>;

const changed = createStore<Labels>(snapshotLabels());

/** For the export: answers that the page keeps may be older than its labels. */
export const changedLabels = (): Labels => changed.get();

/** The name under which this browser labels. */
export const author = preference<string>("author", "", (text) => text.length <= 100);

const labelKey = (run: string, { step, sample }: RolloutKey): string => `${run}/${step}/${sample}`;

export function useLabels(): Labels {
  return useStore(changed);
}

export function labelsOf(labels: Labels, run: string, row: Labelled): Label[] {
  return labels[labelKey(run, row)] ?? row.labels ?? [];
}

export const isStarred = (labels: Label[]): boolean => labels.some(({ name }) => name === "star");

/** The texts of all notes. */
export const notesOf = (labels: Label[]): string =>
  labels.flatMap(({ name, value }) => (name === "note" ? [String(value)] : [])).join("\n");

/** What a later label takes the place of: stars and tags are shared, the rest is its author's. */
function slot({ name, value, author: by }: Label): string {
  if (name === "star") return name;
  if (name === "tag") return `${name} ${value}`;
  return name === "over" ? `${name} ${value} ${by}` : `${name} ${by}`;
}

const without = (labels: Label[], label: Label): Label[] => labels.filter((one) => slot(one) !== slot(label));

const last: Labels = {};

/** Remembers what the server said of a rollout, so that a key can change its labels. */
export function rememberLabels(run: string, row: Labelled): void {
  if (row.labels) last[labelKey(run, row)] = row.labels;
}

const known = (key: string): Label[] => changed.get()[key] ?? last[key] ?? [];

/** What was sent is answered in the order in which it was sent. */
const sent: Record<string, Promise<unknown>> = {};

/** Returns whether the server has kept it. */
export async function setLabel(
  run: string,
  place: RolloutKey,
  { name, value }: Pick<Label, "name" | "value">,
  removed = false,
): Promise<boolean> {
  if (inSnapshot) return false;
  const label: Label = { name, value, author: author.get().trim(), time: null };
  const before = changed.get();
  const key = labelKey(run, place);
  const next = { ...before, [key]: [...without(known(key), label), ...(removed ? [] : [label])] };
  if (name === "over") {
    const other = labelKey(run, { step: place.step, sample: Number(value) });
    next[other] = without(known(other), { ...label, value: place.sample });
  }
  changed.set(next);
  const url = `api/runs/${run}/labels/${place.step}/${place.sample}`;
  const asking = (sent[key] ?? Promise.resolve()).then(() => send("PUT", url, { ...label, time: undefined, removed }));
  const mine = (sent[key] = asking.catch(() => undefined));
  try {
    const { labels } = (await asking) as { labels: Label[] };
    if (sent[key] === mine) changed.set({ ...changed.get(), [key]: labels });
    boardError.set(null);
    forgetMatching((url) => url.startsWith(`api/runs/${run}/`) && /starred=|filter=|\/labels/.test(url));
    return true;
  } catch (error) {
    if (sent[key] === mine) changed.set(before);
    boardError.set(error instanceof Error ? error.message : String(error));
    return false;
  }
}

export async function toggleStar(run: string, place: RolloutKey): Promise<void> {
  await setLabel(run, place, { name: "star", value: null }, isStarred(known(labelKey(run, place))));
}
