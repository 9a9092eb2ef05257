/** What curves are drawn along, of what some of the runs have measured. */

import type { Series } from "../api/types";
import { useText } from "../i18n";
import { type Axis, hasAxis } from "../maths/along";
import { patchRoute } from "../state/router";

export function useAxisNames(): Record<Axis, string> {
  const t = useText();
  return { step: t("step"), tokens: t("tokens"), time: t("minutes"), kl: "KL" };
}

interface Props {
  axis: Axis;
  /** those that the view offers */
  axes: readonly Axis[];
  series: readonly (Series | null)[];
}

export function ChooseAxis({ axis, axes, series }: Props) {
  const t = useText();
  const names = useAxisNames();
  const there = axes.filter((one) => one === axis || series.some((known) => known && hasAxis(known, one)));
  return (
    <label>
      {t("along")}
      <select value={axis} onChange={(event) => patchRoute({ axis: event.currentTarget.value }, true)}>
        {there.map((one) => (
          <option key={one} value={one}>
            {names[one]}
          </option>
        ))}
      </select>
    </label>
  );
}
