/** One rollout in one line; opens its tokens. */

import { number } from "../maths/format";
import { gist } from "../maths/prompt";
import { beginning, oneLine } from "../maths/text";
import { tokensRoute } from "../state/board";
import { go } from "../state/router";

interface Props {
  run: string;
  step: number;
  sample: number;
  reward: unknown;
  prompt?: string;
  response: string;
  chosen?: boolean;
}

/** Characters of a prompt: the response has to be seen too. */
const PROMPT = 60;

export function openTokens(run: string, step: number, sample: number, token: number | null = null): void {
  const { view, query } = tokensRoute(run, step, sample, token);
  go(view, query);
}

export function RolloutLine({ run, step, sample, reward, prompt, response, chosen = false }: Props) {
  return (
    <button type="button" class={`rollout ${chosen ? "chosen" : ""}`} onClick={() => openTokens(run, step, sample)}>
      <b class="number">{number(reward, 3)}</b>
      <span class="line">
        {prompt !== undefined && <span class="muted">{oneLine(beginning(gist(prompt), PROMPT))} ▸ </span>}
        {oneLine(response)}
      </span>
    </button>
  );
}
