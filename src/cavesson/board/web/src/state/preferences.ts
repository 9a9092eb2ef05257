/** What a person chose and finds again: kept in this browser only. */

import { createStore, type Store } from "./store";

export function preference<T extends string>(key: string, fallback: T, valid: (text: string) => boolean): Store<T> {
  const name = `cavesson.${key}`;
  const saved = stored(name);
  const store = createStore(saved !== null && valid(saved) ? (saved as T) : fallback);
  store.watch(() => {
    try {
      localStorage.setItem(name, store.get());
    } catch {
      // Storage can be switched off, and is for some files opened from disk: the choice then lasts while the page does.
    }
  });
  return store;
}

function stored(name: string): string | null {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

export type Theme = "auto" | "light" | "dark";

export const theme = preference<Theme>("theme", "auto", (text) => ["auto", "light", "dark"].includes(text));

const dark = matchMedia("(prefers-color-scheme: dark)");

/** Counts up whenever the colours change, so that canvases draw anew. */
export const appearance = createStore(0);

export function applyTheme(): void {
  const choice = theme.get();
  document.documentElement.dataset["theme"] = choice === "auto" ? (dark.matches ? "dark" : "light") : choice;
  appearance.set(appearance.get() + 1);
}

theme.watch(applyTheme);
dark.addEventListener("change", applyTheme);
