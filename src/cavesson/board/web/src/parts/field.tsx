/** A text field that is part of the address. */

import { useEffect, useState } from "preact/hooks";
import { patchRoute, useRoute } from "../state/router";

/** Typing is answered after this pause. */
const PAUSE_MS = 120;

interface Props {
  /** key of the query; another text begins at the first page again */
  name: "q" | "filter" | "find" | "setting";
  hint: string;
  title?: string;
  class: string;
  wrong?: boolean;
  field?: { current: HTMLInputElement | null };
}

export function Field({ name, hint, title, class: kind, wrong = false, field }: Props) {
  const { query } = useRoute();
  const [text, setText] = useState(query[name] ?? "");
  useEffect(() => setText(query[name] ?? ""), [query[name]]);
  useEffect(() => {
    if (text === (query[name] ?? "")) return;
    const timer = setTimeout(() => patchRoute({ [name]: text, offset: undefined }, true), PAUSE_MS);
    return () => clearTimeout(timer);
  }, [text]);
  return (
    <input
      ref={field ?? null}
      type="search"
      class={`${kind} ${wrong ? "wrong" : ""}`}
      placeholder={hint}
      title={title}
      aria-label={title ?? hint}
      value={text}
      spellcheck={false}
      onInput={(event) => setText(event.currentTarget.value)}
      onKeyDown={(event) => {
        if (event.key === "Enter") patchRoute({ [name]: text, offset: undefined }, true);
        if (event.key === "Enter" || event.key === "Escape") event.currentTarget.blur();
      }}
    />
  );
}
