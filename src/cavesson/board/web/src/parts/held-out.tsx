/** Shows responses to held-out prompts in place of those that were trained on; both are never counted together. */

import type { Series } from "../api/types";
import { type Translate, useText } from "../i18n";
import { whole } from "../maths/format";
import { patchRoute, useRoute } from "../state/router";
import type { Split } from "../state/selection";

interface SwitchProps {
  /** held-out responses of what is shown; without any, there is nothing to switch */
  count: number;
  /** whether the filter chooses the split instead */
  filtered?: boolean;
}

export function HeldOutSwitch({ count, filtered = false }: SwitchProps) {
  const t = useText();
  const on = useRoute().query["held_out"] === "1";
  if (count === 0 && !on) return null;
  // Places in a list of the others mean nothing here.
  const turn = (): void =>
    patchRoute({ held_out: on ? undefined : 1, offset: undefined, from: undefined, at: undefined }, true);
  return (
    <button
      type="button"
      class={on && !filtered ? "on" : ""}
      aria-pressed={on && !filtered}
      disabled={filtered}
      title={filtered ? t("splitFiltered") : t("heldOutHint", { count: whole(count) })}
      onClick={turn}
    >
      {t("heldOut")}
    </button>
  );
}

/** The split in which a column is shown: of one that only held-out responses have, theirs. */
export function shownSplit(series: Series | null, column: string, chosen: Split): Split {
  const only = !series?.rollups[column] && series?.rollups[`eval/${column}`];
  return only ? "eval" : chosen;
}

/** A title that says whether held-out responses are shown. */
export const titled = (title: string, split: Split, t: Translate): string =>
  split ? `${title} · ${t("heldOut")}` : title;
