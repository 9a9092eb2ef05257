/** Which two responses to a prompt are compared, as the address says it. */

import type { PromptPage, RolloutKey } from "../api/types";

export const ENDS = ["first", "last", "best", "worst"] as const;
export type End = (typeof ENDS)[number];

export const SIDES = ["a", "b"] as const;
export type PromptSide = (typeof SIDES)[number];

export const isEnd = (text: string | undefined): text is End => ENDS.some((end) => end === text);

export const placeText = ({ step, sample }: RolloutKey): string => `${step}.${sample}`;

export function parsePlace(text: string | undefined): RolloutKey | null {
  const found = /^(\d+)\.(-?\d+)$/.exec(text ?? "");
  return found ? { step: Number(found[1]), sample: Number(found[2]) } : null;
}

const isSame = (one: RolloutKey, other: RolloutKey): boolean => placeText(one) === placeText(other);

/** The response on a side: the one in the address, else the first against the best, or the last where that is no other. */
export function sideOf(prompt: PromptPage, side: PromptSide, given: string | undefined): RolloutKey | null {
  if (isEnd(given)) return prompt[given];
  const { first, last, best } = prompt;
  return parsePlace(given) ?? (side === "a" ? first : best && first && !isSame(best, first) ? best : last);
}
