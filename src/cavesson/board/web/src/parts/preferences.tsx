/** Pairs within a group: of two responses, the one that somebody prefers. */

import type { GroupResponse } from "../api/types";
import { inSnapshot } from "../api/snapshot";
import { useText } from "../i18n";
import { visible } from "../maths/text";
import { author, labelsOf, setLabel, useLabels } from "../state/labels";
import { useStore } from "../state/store";

/** The pairs of a group, each of which its author can take away. */
export function PreferenceList({ run, responses }: { run: string; responses: GroupResponse[] }) {
  const t = useText();
  const labels = useLabels();
  const me = useStore(author).trim();
  const pairs = responses.flatMap((one) =>
    labelsOf(labels, run, one).flatMap((label) => (label.name === "over" ? [{ one, label }] : [])),
  );
  if (pairs.length === 0) return null;
  return (
    <span class="chips preferences">
      <span class="muted">{t("preferences")}</span>
      {pairs.map(({ one, label }) => (
        <button
          key={`${one.sample} ${label.value} ${label.author}`}
          type="button"
          title={[t("preferenceHint"), label.author, label.time]
            .filter(Boolean)
            .map((text) => visible(text!))
            .join(" · ")}
          disabled={inSnapshot || label.author !== me}
          onClick={() => void setLabel(run, one, { name: "over", value: label.value }, true)}
        >
          {one.sample} ≻ {label.value}
          {label.author === me ? (inSnapshot ? "" : " ✕") : ` ${visible(label.author || t("somebody"))}`}
        </button>
      ))}
    </span>
  );
}

interface Props {
  run: string;
  one: GroupResponse;
  /** the response that is to be preferred to another one */
  chosen: GroupResponse | null;
  onChoose: (chosen: GroupResponse | null) => void;
}

/** First the better response is chosen, then those it is better than. */
export function Prefer({ run, one, chosen, onChoose }: Props) {
  const t = useText();
  if (inSnapshot) return null;
  if (chosen && chosen !== one)
    return (
      <button type="button" onClick={() => void setLabel(run, chosen, { name: "over", value: one.sample })}>
        {t("rejectThis", { sample: chosen.sample })}
      </button>
    );
  return (
    <button
      type="button"
      class={chosen ? "on" : ""}
      aria-pressed={chosen === one}
      title={t("preferHint")}
      onClick={() => onChoose(chosen ? null : one)}
    >
      {t("prefer")}
    </button>
  );
}
