import { useText } from "../i18n";
import { patchRoute } from "../state/router";

export function Smoothing({ value }: { value: number }) {
  const t = useText();
  return (
    <label class="ranged">
      {t("smoothing")}
      <input
        type="range"
        min="0"
        max="0.98"
        step="0.02"
        value={value}
        onInput={(event) => patchRoute({ smooth: Number(event.currentTarget.value) || undefined }, true)}
      />
      <output>{value.toFixed(2)}</output>
    </label>
  );
}
