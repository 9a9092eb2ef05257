/** A text that is kept when the field is left, or with Ctrl and Enter. */

import { useEffect, useRef, useState } from "preact/hooks";
import { inSnapshot } from "../api/snapshot";

/** The server keeps no longer note. */
const LONGEST = 10_000;

interface Props {
  /** what the note is on */
  at: string;
  /** what the server has kept */
  note: string;
  field: { current: HTMLTextAreaElement | null };
  label: string;
  placeholder: string;
  onFocus?: () => void;
  /** returns whether the server has kept it */
  onKeep: (text: string) => Promise<boolean>;
}

export function NoteField({ at, note, field, label, placeholder, onFocus, onKeep }: Props) {
  const [text, setText] = useState(note);
  // What the server has not kept stays in the field.
  const unsaved = useRef({ at: "", text: "" });
  useEffect(() => setText(unsaved.current.at === at ? unsaved.current.text : note), [note, at]);
  const keep = (): void => {
    if (text === note) return;
    const mine = (unsaved.current = { at, text });
    void onKeep(text).then((kept) => {
      if (kept && unsaved.current === mine) unsaved.current = { at: "", text: "" };
    });
  };
  if (inSnapshot && note === "") return null;
  return (
    <textarea
      ref={field}
      class="note"
      rows={text.includes("\n") || text.length > 60 ? 3 : 1}
      placeholder={placeholder}
      aria-label={label}
      value={text}
      readOnly={inSnapshot}
      maxLength={LONGEST}
      onFocus={onFocus}
      onInput={(event) => setText(event.currentTarget.value)}
      onBlur={keep}
      onKeyDown={(event) => {
        const ends = event.key === "Escape" || (event.key === "Enter" && (event.ctrlKey || event.metaKey));
        if (ends && !event.isComposing) event.currentTarget.blur();
      }}
    />
  );
}
