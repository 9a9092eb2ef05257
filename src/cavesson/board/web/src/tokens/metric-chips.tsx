/** Which metric colours the text, and which ones stand below as strips. */

import { useText } from "../i18n";
import { Switch } from "../parts/segments";
import { patchRoute } from "../state/router";
import type { Measured } from "./measured";

interface Props {
  measured: Measured[];
  chosen: Measured;
  strips: Measured[];
}

export function MetricChips({ measured, chosen, strips }: Props) {
  const t = useText();
  const toggle = (one: Measured): void => {
    const next = strips.includes(one)
      ? strips.filter((strip) => strip !== one)
      : measured.filter((m) => m === one || strips.includes(m));
    patchRoute({ strips: next.map(({ metric }) => metric.key).join(",") || "none" }, true);
  };
  return (
    <>
      {measured.map((one, i) => (
        <span key={one.metric.key} class="chip segments">
          <button
            type="button"
            class={one === chosen ? "on" : ""}
            title={`${t(`metric_${one.metric.key}` as "metric_kl_k1")}${i < 9 ? `  [${i + 1}]` : ""}`}
            aria-pressed={one === chosen}
            onClick={() => patchRoute({ metric: one.metric.key }, true)}
          >
            {one.metric.key}
          </button>
          <button
            type="button"
            class={`strip ${strips.includes(one) ? "on" : ""}`}
            title={t("asStrip")}
            aria-label={`${one.metric.key}: ${t("asStrip")}`}
            aria-pressed={strips.includes(one)}
            onClick={() => toggle(one)}
          >
            ≡
          </button>
        </span>
      ))}
      <Switch name="stripes" label={t("stripes")} title={t("stripesHint")} />
    </>
  );
}
