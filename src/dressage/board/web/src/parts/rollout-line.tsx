/** One rollout in one line; opens its tokens. */

import { number } from "../maths/format";
import { gist } from "../maths/prompt";
import { oneLine } from "../maths/text";
import { go, tabRoute } from "../state/router";

interface Props {
  run: number;
  step: number;
  sample: number;
  reward: unknown;
  prompt?: string;
  response: string;
  chosen?: boolean;
}

/** The response has to be seen too. */
const beginning = (text: string): string => (text.length > 60 ? `${text.slice(0, 58)}…` : text);

/** The choice of metrics stays from one rollout to the next. */
export function openTokens(run: number, step: number, sample: number, token: number | null = null): void {
  const { token: _, ...kept } = tabRoute("tokens").query;
  const place = { run: String(run), step: String(step), sample: String(sample) };
  go("tokens", { ...kept, ...place, ...(token === null ? {} : { token: String(token) }) });
}

export function RolloutLine({ run, step, sample, reward, prompt, response, chosen = false }: Props) {
  return (
    <button type="button" class={`rollout ${chosen ? "chosen" : ""}`} onClick={() => openTokens(run, step, sample)}>
      <b class="number">{number(reward, 3)}</b>
      <span class="line">
        {prompt !== undefined && <span class="muted">{oneLine(beginning(gist(prompt)))} ▸ </span>}
        {oneLine(response)}
      </span>
    </button>
  );
}
