/** Loads the script with the libraries for Markdown and LaTeX; a saved page has it if it was loaded there. */

import { loadScript } from "../api/script";
import { inSnapshot } from "../api/snapshot";
import type { Libraries } from "../markdown";
import { createStore, useStore } from "../state/store";

const store = createStore<Libraries | null>(globalThis.cavessonMarkdown ?? null);
let asked = false;

/** The libraries, or null while they are loaded; a page without a server may not have them. */
export function useMarkdown(): Libraries | null {
  if (!asked && !inSnapshot && store.get() === null) {
    asked = true;
    void loadScript("markdown.js").then((there) => {
      asked = there;
      if (there) store.set(globalThis.cavessonMarkdown!);
    });
  }
  return useStore(store);
}
