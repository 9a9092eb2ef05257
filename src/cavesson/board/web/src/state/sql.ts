/** Queries of a run: asked once, kept for who comes back, and ended when nobody waits for them. */

import { useContext, useEffect, useState } from "preact/hooks";
import { address, send } from "../api/client";
import { messageOf } from "../api/resource";
import type { SqlAnswer } from "../api/types";
import { Ahead } from "./router";

export interface Asked {
  run: string;
  query: string;
  limit: number;
}

export interface Answering {
  data: SqlAnswer | null;
  error: string | null;
  running: boolean;
  cancelled: boolean;
  cancel: () => void;
}

const KEPT = 8;
const kept = new Map<string, SqlAnswer>();

/** What stands in the editor of each run while another view is shown. */
export const drafts = new Map<string, string>();

interface State {
  key: string | null;
  data: SqlAnswer | null;
  error: string | null;
  cancelled: boolean;
}

const keyOf = ({ run, query, limit }: Asked): string => JSON.stringify([run, query, limit]);

/** @param again counts up when the same is to be asked once more */
export function useAnswer(asked: Asked | null, again: number): Answering {
  const ahead = useContext(Ahead) !== null;
  const key = asked && keyOf(asked);
  const [state, set] = useState<State>({ key: null, data: null, error: null, cancelled: false });
  const [stop, setStop] = useState<AbortController | null>(null);
  useEffect(() => {
    if (asked === null || key === null || ahead) return;
    const done = (end: Partial<State>): void => set({ key, data: null, error: null, cancelled: false, ...end });
    const known = kept.get(key);
    if (known) return done({ data: known });
    const controller = new AbortController();
    let current = true;
    setStop(controller);
    const ended = (end: Partial<State>): void => {
      if (!current) return;
      setStop(null);
      done(end);
    };
    const { run, ...body } = asked;
    void (send("POST", address(`runs/${run}/sql`), body, controller.signal) as Promise<SqlAnswer>).then(
      (data) => {
        keep(key, data);
        ended({ data });
      },
      (error: unknown) => ended(controller.signal.aborted ? { cancelled: true } : { error: messageOf(error) }),
    );
    return () => {
      current = false;
      controller.abort();
      setStop(null);
    };
  }, [key, again]);
  const running = stop !== null;
  const told = state.key === key && !running ? state : null;
  return {
    data: state.key === key ? state.data : null,
    error: told?.error ?? null,
    cancelled: told?.cancelled ?? false,
    running,
    cancel: () => stop?.abort(),
  };
}

/** Has the server asked again, as a run may have grown. */
export const forgetAnswer = (asked: Asked): void => void kept.delete(keyOf(asked));

function keep(key: string, answer: SqlAnswer): void {
  kept.set(key, answer);
  if (kept.size > KEPT) kept.delete(kept.keys().next().value!);
}
