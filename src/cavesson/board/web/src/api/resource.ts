/** Answers inside components: the last one stays in view while the next is on its way. */

import { useLayoutEffect, useState } from "preact/hooks";
import { ApiError, getJson } from "./client";
import { progressOf } from "./progress";
import { inSnapshot } from "./snapshot";

export interface Resource<T> {
  data: T | null;
  error: string | null;
  loading: boolean;
}

interface Held<T> {
  key: string | null;
  data: T | null;
  error: string | null;
}

/** An answer from an index that is being built is asked for again after this pause. */
const PARTIAL_MS = 1000;

/** So is one that the server did not give, as it was gone. */
const GONE_MS = 3000;

/**
 * Loads whenever `key` changes; null loads nothing.
 *
 * @param key what is asked for
 * @param version counts up when the answer has to be asked for again, as the run grew
 * @param load asks; by default for JSON at that address
 */
export function useResource<T>(
  key: string | null,
  version = 0,
  load: (key: string) => Promise<T> = getJson,
): Resource<T> {
  const [held, hold] = useState<Held<T>>({ key: null, data: null, error: null });
  // Asked before the browser paints what is there by now: the answer is often here for the next frame.
  useLayoutEffect(() => {
    if (key === null) return;
    let current = true;
    let again: ReturnType<typeof setTimeout> | undefined;
    const ask = (): void =>
      void load(key).then(
        (data) => {
          if (!current) return;
          hold({ key, data, error: null });
          if (progressOf(data) && !inSnapshot) again = setTimeout(ask, PARTIAL_MS);
        },
        (error: unknown) => {
          if (!current) return;
          hold((before) => ({ key, data: before.key === key ? before.data : null, error: messageOf(error) }));
          if (error instanceof ApiError && error.status === 0) again = setTimeout(ask, GONE_MS);
        },
      );
    ask();
    return () => {
      current = false;
      clearTimeout(again);
    };
  }, [key, version]);
  return {
    data: key === null ? null : held.data,
    error: held.key === key ? held.error : null,
    loading: held.key !== key,
  };
}

export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
