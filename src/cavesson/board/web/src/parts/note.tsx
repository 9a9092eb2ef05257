/** A note on a rollout; writing one stars it. */

import { useEffect, useRef, useState } from "preact/hooks";
import { inSnapshot } from "../api/snapshot";
import type { Rollout } from "../api/types";
import { useText } from "../i18n";
import { setStar, starOf, useStars } from "../state/stars";

/** The server keeps no longer note. */
const LONGEST = 10_000;

export function Note({ run, row }: { run: string; row: Rollout }) {
  const t = useText();
  const stars = useStars();
  const note = starOf(stars, run, row);
  const [text, setText] = useState(note ?? "");
  const at = `${run}/${row.step}/${row.sample}`;
  // What the server has not kept stays in the field.
  const unsaved = useRef({ at: "", text: "" });
  useEffect(() => setText(unsaved.current.at === at ? unsaved.current.text : (note ?? "")), [note, at]);
  if (note === null) return null;
  const keep = (): void => {
    if (text === note) return;
    const mine = (unsaved.current = { at, text });
    void setStar(run, row, text).then((kept) => {
      if (kept && unsaved.current === mine) unsaved.current = { at: "", text: "" };
    });
  };
  return (
    <textarea
      class="note"
      rows={2}
      placeholder={t("noteHint")}
      aria-label={t("note")}
      value={text}
      readOnly={inSnapshot}
      maxLength={LONGEST}
      onInput={(event) => setText(event.currentTarget.value)}
      onBlur={keep}
      onKeyDown={(event) => event.key === "Escape" && event.currentTarget.blur()}
    />
  );
}
