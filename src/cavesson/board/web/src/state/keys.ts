/** Keyboard: single keys, "g" followed by a letter for the views, and "r" followed by a rating. */

import { useLayoutEffect, useRef } from "preact/hooks";

export type Keys = Record<string, () => void>;

/** How long a "g" or "r" waits for the next key. */
const WAIT_MS = 1200;

/** "g " when the key before this one was a g, "r " when it was an r. */
let prefix = "";
let before = { key: "", at: 0 };

// In the capture phase, so that every handler of a key sees the same prefix.
addEventListener(
  "keydown",
  (event) => {
    const waits = /^[gr]$/.test(before.key) && event.timeStamp - before.at < WAIT_MS && !isField(event.target);
    prefix = waits ? `${before.key} ` : "";
    before = { key: waits ? "" : event.key, at: event.timeStamp };
  },
  { capture: true },
);

/** Binds keys while the component is shown; typing in fields is left alone. */
export function useKeys(keys: Keys): void {
  const latest = useRef(keys);
  latest.current = keys;
  // With what is shown, not after it is painted: a quick hand presses the next key before.
  useLayoutEffect(() => {
    const pressed = (event: KeyboardEvent): void => {
      if (event.ctrlKey || event.metaKey || event.altKey || isField(event.target)) return;
      if (event.key === "Enter" && isPressed(event.target)) return;
      // Closes the dialog, and what lies below stays open.
      if (event.key === "Escape" && document.querySelector("dialog[open]")) return;
      const handler = latest.current[prefix + event.key];
      if (handler) {
        event.preventDefault();
        handler();
      }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

/** Enter presses what has the focus. */
function isPressed(target: EventTarget | null): boolean {
  return target instanceof Element && target.closest("a, button, summary") !== null;
}

function isField(target: EventTarget | null): boolean {
  return (
    target instanceof HTMLElement &&
    /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName) &&
    target.getAttribute("type") !== "range"
  );
}
