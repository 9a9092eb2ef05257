/** A value that components watch. */

import { useEffect, useState } from "preact/hooks";

export interface Store<T> {
  get: () => T;
  set: (value: T) => void;
  watch: (listener: () => void) => () => void;
}

export function createStore<T>(value: T): Store<T> {
  const listeners = new Set<() => void>();
  return {
    get: () => value,
    set: (next) => {
      if (Object.is(next, value)) return;
      value = next;
      for (const listener of [...listeners]) listener();
    },
    watch: (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}

export function useStore<T>(store: Store<T>): T {
  const value = store.get();
  const [, redraw] = useState(0);
  useEffect(() => {
    const stop = store.watch(() => redraw((count) => count + 1));
    // It may have changed between drawing and watching.
    if (!Object.is(value, store.get())) redraw((count) => count + 1);
    return stop;
  }, [store]);
  return value;
}
