/** Puts a text on the clipboard, exactly as it was recorded. */

import { useEffect, useState } from "preact/hooks";
import { useText } from "../i18n";

/** How long the button says that it has done so. */
const SAID_MS = 1500;

interface Props {
  text: () => string;
  /** what it says in place of *Copy*, and what it is for */
  label?: string;
  title?: string;
}

export function CopyButton({ text, label, title }: Props) {
  const t = useText();
  const [done, setDone] = useState(false);
  useEffect(() => {
    if (!done) return;
    const timer = setTimeout(() => setDone(false), SAID_MS);
    return () => clearTimeout(timer);
  }, [done]);
  return (
    <button type="button" class="quiet" title={title ?? t("copyHint")} onClick={() => setDone(copy(text()))}>
      {done ? t("copied") : (label ?? t("copy"))}
    </button>
  );
}

/** Returns whether the browser did it. `navigator.clipboard` is missing where the board is not on this machine. */
function copy(text: string): boolean {
  const give = (event: ClipboardEvent): void => {
    event.stopImmediatePropagation();
    event.clipboardData!.setData("text/plain", text);
    event.preventDefault();
  };
  addEventListener("copy", give, true);
  try {
    return document.execCommand("copy");
  } finally {
    removeEventListener("copy", give, true);
  }
}
