/** Follows running runs: the server says what was added, after the last message this page has seen. */

import { address } from "./client";
import type { LiveEvent } from "./types";
import { inSnapshot } from "./snapshot";
import { grow, loadRuns, runs } from "../state/board";
import { createStore } from "../state/store";

type Connection = "off" | "open" | "lost";

export const connection = createStore<Connection>("off");

/** After an answer that is not a stream, such as a proxy's, the browser does not connect again by itself. */
const RETRY_MS = 3000;

/** A run that ends or dies sends no message. */
const LOOK_MS = 30_000;

export function follow(): void {
  if (inSnapshot) return;
  listen("");
  setInterval(() => void loadRuns(), LOOK_MS);
}

/** @param after the last message that this page has seen */
function listen(after: string): void {
  const source = new EventSource(address("events", { after })); // reconnects with Last-Event-ID
  source.onopen = () => {
    // What could not be asked for meanwhile is asked for now.
    if (connection.get() === "lost")
      for (const { run, opened } of runs.get() ?? []) if (opened !== false) soon(run, false);
    connection.set("open");
  };
  source.onerror = () => {
    connection.set("lost");
    if (source.readyState === EventSource.CLOSED) setTimeout(() => listen(after), RETRY_MS);
  };
  source.onmessage = (message: MessageEvent<string>) => {
    after = message.lastEventId;
    const event = JSON.parse(message.data) as LiveEvent;
    if (event.appeared) void loadRuns();
    else soon(event.run, event.restarted);
  };
}

/** A run that grows faster than this is looked at this often. */
const PAUSE_MS = 1500;

const waiting = new Set<string>();

/** Runs that grew meanwhile, and whether they were restarted. */
const missed = new Map<string, boolean>();

function soon(run: string, restarted: boolean): void {
  if (waiting.has(run)) {
    missed.set(run, restarted || missed.get(run) === true);
    return;
  }
  waiting.add(run);
  const pause = new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
  // One look at a time, so that an answer never replaces a newer one.
  void Promise.all([grow(run, restarted), pause]).then(() => {
    waiting.delete(run);
    const again = missed.get(run);
    missed.delete(run);
    if (again !== undefined) soon(run, again);
  });
}
