/** The numbers of a rollout. */

import type { Maybe, Rollout } from "../api/types";
import { number } from "../maths/format";
import { visible } from "../maths/text";

/** Shown elsewhere or no fact about the rollout. */
const ELSEWHERE = new Set([
  "row",
  "step",
  "sample",
  "prompt",
  "response",
  "ref_response",
  "ground_truth",
  "extra",
  "parts",
  "weights",
  "reasons",
  "siblings",
  "tokens",
  "labels",
  "previous",
  "next",
  "prompt_ids",
  "hit",
  "conversation",
  "answer",
  "attempt",
  "rank",
  "prompt_id",
]);

export function Facts({ rollout }: { rollout: Rollout }) {
  const parts = Object.entries(rollout.parts ?? {}).map(([name, value]): [string, unknown] => [
    `part/${name}`,
    weighted(value, rollout.weights?.[name] ?? 1),
  ]);
  const reasons = Object.entries(rollout.reasons ?? {}).map(([name, text]): [string, unknown] => [
    `reason/${name}`,
    text,
  ]);
  const facts: [string, unknown][] = Object.entries(rollout).filter(
    ([name, value]) => !ELSEWHERE.has(name) && !name.endsWith("_truncated") && value !== null,
  );
  // A single part with weight 1 is the reward itself.
  const differ = parts.length > 1 || Object.values(rollout.weights ?? {}).some((weight) => weight !== 1);
  const all = [...facts, ...(differ ? parts : []), ...reasons];
  return <FactList facts={all.map(([name, value]) => [name, shown(name, value)])} />;
}

/** A part of the reward, and its weight in the sum unless that is 1. */
function weighted(value: Maybe, weight: number): unknown {
  return weight === 1 ? value : `${number(value)} × ${number(weight)}`;
}

/** Names and what stands beside them. */
export function FactList({ facts }: { facts: [name: string, value: string][] }) {
  return (
    <dl class="facts">
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

function shown(name: string, value: unknown): string {
  if (typeof value !== "number") return visible(String(value));
  return name === "group" || name === "policy_version" ? String(value) : number(value);
}
