/** A text field that is part of the address. */

import { useEffect, useRef, useState } from "preact/hooks";
import { patchRoute, useRoute } from "../state/router";

/** Typing is answered after this pause. */
const PAUSE_MS = 120;

interface Props {
  /** key of the query; another text begins at the first page again */
  name: "q" | "filter" | "find" | "setting";
  hint: string;
  title?: string;
  class: string;
  /** its name, where the hint is an example */
  label?: string;
  wrong?: boolean;
  field?: { current: HTMLInputElement | null };
}

export function Field({ name, hint, label = hint, title, class: kind, wrong = false, field }: Props) {
  const { query } = useRoute();
  const [text, setText] = useState(query[name] ?? "");
  // What was typed comes back in the address, when more may have been typed: only what others set is taken over.
  const sent = useRef(text);
  const send = (): void => {
    sent.current = text;
    patchRoute({ [name]: text, offset: undefined }, true);
  };
  useEffect(() => {
    const now = query[name] ?? "";
    if (now !== sent.current) setText((sent.current = now));
  }, [query[name]]);
  useEffect(() => {
    if (text === (query[name] ?? "")) return;
    const timer = setTimeout(send, PAUSE_MS);
    return () => clearTimeout(timer);
  }, [text]);
  return (
    <input
      ref={field ?? null}
      type="search"
      class={`${kind} ${wrong ? "wrong" : ""}`}
      placeholder={hint}
      title={title}
      aria-label={label}
      value={text}
      spellcheck={false}
      onInput={(event) => setText(event.currentTarget.value)}
      onKeyDown={(event) => {
        if (event.isComposing) return; // the key chooses a character
        if (event.key === "Enter") send();
        if (event.key === "Enter" || event.key === "Escape") event.currentTarget.blur();
      }}
    />
  );
}
