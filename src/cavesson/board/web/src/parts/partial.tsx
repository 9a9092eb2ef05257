/** What an answer lacks: rollouts that are not indexed yet, and those of the other split. */

import type { Progress } from "../api/types";
import { useText } from "../i18n";
import { whole } from "../maths/format";
import { patchRoute } from "../state/router";
import type { Split } from "../state/selection";

/** Says of an answer that it is made from an index that is being built; null once that is complete. */
export function Partial({ of }: { of: Progress | null | undefined }) {
  const t = useText();
  return of ? <p class="warning pad">{t("partial", { indexed: whole(of.indexed), of: whole(of.of) })}</p> : null;
}

interface Props {
  count: number;
  /** what is shown */
  split: Split;
}

/** Says of an empty answer how many rollouts of the other split there are, and shows them. */
export function LeftOut({ count, split }: Props) {
  const t = useText();
  if (count === 0) return null;
  const turn = (): void => patchRoute({ held_out: split ? undefined : 1, offset: undefined, from: undefined }, true);
  return (
    <p class="empty pad">
      {t(split ? "trainedLeftOut" : "heldOutLeftOut", { count: whole(count) })}{" "}
      <button type="button" onClick={turn}>
        {t("showThem")}
      </button>
    </p>
  );
}
