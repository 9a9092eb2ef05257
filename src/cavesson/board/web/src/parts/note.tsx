/** A note on a rollout; writing one stars it. */

import { useEffect, useState } from "preact/hooks";
import { inSnapshot } from "../api/snapshot";
import type { Rollout } from "../api/types";
import { useText } from "../i18n";
import { setStar, starOf, useStars } from "../state/stars";

export function Note({ run, row }: { run: number; row: Rollout }) {
  const t = useText();
  const stars = useStars();
  const note = starOf(stars, run, row);
  const [text, setText] = useState(note ?? "");
  useEffect(() => setText(note ?? ""), [note]);
  if (note === null) return null;
  const keep = (): void => {
    if (text !== note) void setStar(run, row, text);
  };
  return (
    <textarea
      class="note"
      rows={2}
      placeholder={t("noteHint")}
      aria-label={t("note")}
      value={text}
      readOnly={inSnapshot}
      onInput={(event) => setText(event.currentTarget.value)}
      onBlur={keep}
      onKeyDown={(event) => event.key === "Escape" && event.currentTarget.blur()}
    />
  );
}
