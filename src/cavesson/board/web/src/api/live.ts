/** Follows running runs: the server says what was added, after the last message this page has seen. */

import type { LiveEvent } from "./types";
import { inSnapshot } from "./snapshot";
import { grow } from "../state/board";
import { createStore } from "../state/store";

type Connection = "off" | "open" | "lost";

export const connection = createStore<Connection>("off");

export function follow(): void {
  if (inSnapshot) return;
  const source = new EventSource("api/events"); // reconnects by itself, with Last-Event-ID
  source.onopen = () => connection.set("open");
  source.onerror = () => connection.set("lost");
  source.onmessage = (message: MessageEvent<string>) => soon((JSON.parse(message.data) as LiveEvent).run);
}

/** A run that grows faster than this is looked at this often. */
const PAUSE_MS = 1500;

const waiting = new Set<number>();
const missed = new Set<number>();

function soon(run: number): void {
  if (waiting.has(run)) {
    missed.add(run);
    return;
  }
  waiting.add(run);
  void grow(run);
  setTimeout(() => {
    waiting.delete(run);
    if (missed.delete(run)) soon(run);
  }, PAUSE_MS);
}
