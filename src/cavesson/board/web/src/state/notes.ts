/** Notes on steps and curves, kept by the server beside the run. */

import { address, forgetMatching, send } from "../api/client";
import { useResource } from "../api/resource";
import { inSnapshot } from "../api/snapshot";
import type { Note } from "../api/types";
import type { Flag } from "../charts/line-chart";
import type { Curve } from "../charts/line-spec";
import { boardError, useVersion } from "./board";
import { author } from "./labels";
import { createStore, useStore } from "./store";

/** Counts up with every note that is written here. */
const written = createStore(0);

const NONE: Note[] = [];

const notesAddress = (run: string): string => address(`runs/${run}/notes`);

export function useNotes(run: string): Note[] {
  const version = useVersion(run);
  return useResource<Note[]>(notesAddress(run), version + useStore(written)).data ?? NONE;
}

/** Writes a note, or with an empty text takes away one's own; returns whether the server has kept it. */
export async function writeNote(run: string, step: number, metric: string | null, text: string): Promise<boolean> {
  if (inSnapshot) return false;
  try {
    await send("PUT", `api/runs/${run}/notes/${step}`, { metric, text, author: author.get().trim() });
    boardError.set(null);
  } catch (error) {
    boardError.set(error instanceof Error ? error.message : String(error));
    return false;
  }
  forgetMatching((url) => url === notesAddress(run));
  written.set(written.get() + 1);
  return true;
}

/** The marks of a chart: notes on a whole step stand in every chart. */
export function flagsOf(notes: readonly Note[], curves: readonly Curve[], colour: string, who = ""): Flag[] {
  const keys = new Set(curves.map(({ key }) => key));
  return notes.flatMap(({ step, metric, text, author: by }) =>
    metric === null || keys.has(metric) ? [{ step, colour, text: [who, by, text].filter(Boolean).join(": ") }] : [],
  );
}
