/** The other responses to the same prompt, by their rewards. */

import type { Rollout } from "../api/types";
import { useText } from "../i18n";
import { number, whole } from "../maths/format";
import { openTokens } from "./rollout-line";

export function Siblings({ run, rollout }: { run: string; rollout: Rollout }) {
  const t = useText();
  if (rollout.siblings.length < 2) return null;
  return (
    <span class="chips">
      <span class="muted">{t("siblings")}</span>
      {rollout.siblings.map(({ step, sample, reward, length }) => (
        <button
          key={sample}
          type="button"
          class={sample === rollout.sample ? "on" : ""}
          title={t("lengthOf", { length: whole(length) })}
          onClick={() => openTokens(run, step, sample)}
        >
          {number(reward, 3)}
        </button>
      ))}
    </span>
  );
}
