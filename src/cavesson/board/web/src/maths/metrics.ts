/** What can be shown of a token: the recorded columns and what follows from them. */

import { DERIVED } from "./derived";

export type TokenColumns = Record<string, ArrayLike<number>>;

export type Kind =
  | "signed" // limits symmetric about zero, two hues
  | "positive" // from zero upwards, one hue
  | "surprise" // log-probabilities: the lower, the stronger
  | "fraction"; // 0 to 1

export interface TokenMetric {
  key: string;
  kind: Kind;
  needs: readonly string[];
  compute: (columns: TokenColumns, gamma: number) => Float32Array;
}

const recorded = (key: string, kind: Kind): TokenMetric => ({
  key,
  kind,
  needs: [key],
  compute: (columns) => new Float32Array(columns[key]!),
});

const derived = (key: keyof typeof DERIVED, kind: Kind): TokenMetric => {
  const needs: readonly string[] = DERIVED[key].needs;
  const of: (a: number, b: number) => number = DERIVED[key].of;
  return {
    key,
    kind,
    needs,
    compute: (columns) => {
      const first = columns[needs[0]!]!;
      const second = columns[needs.at(-1)!]!;
      const values = new Float32Array(first.length);
      for (let i = 0; i < values.length; i++) values[i] = of(first[i]!, second[i]!);
      return values;
    },
  };
};

/** In the order of the page; the keys 1 to 9 choose the first nine that a run has. */
export const TOKEN_METRICS: readonly TokenMetric[] = [
  derived("kl_k1", "signed"),
  recorded("logprob", "surprise"),
  recorded("ref_logprob", "surprise"),
  derived("teacher_kl", "signed"),
  recorded("teacher_logprob", "surprise"),
  derived("prob", "fraction"),
  derived("ref_prob", "fraction"),
  derived("kl_k3", "positive"),
  recorded("value", "signed"),
  recorded("token_reward", "signed"),
  { key: "return_to_go", kind: "signed", needs: ["token_reward"], compute: (c, gamma) => returnToGo(c, gamma) },
  recorded("return", "signed"),
  {
    key: "monte_carlo_error",
    kind: "signed",
    needs: ["value", "token_reward"],
    compute: (c, gamma) => returnToGo(c, gamma).map((target, i) => c["value"]![i]! - target),
  },
  recorded("advantage", "signed"),
  recorded("entropy", "positive"),
  derived("sampler_gap", "signed"),
];

/**
 * Σ γ^k · token_reward from each token to the last one that was learned, the critic's true target; NaN behind the
 * last reward that was measured, and before one that was not.
 */
export function returnToGo(columns: TokenColumns, gamma: number): Float32Array {
  const rewards = columns["token_reward"]!;
  const learned = columns["learned"];
  const result = new Float32Array(rewards.length).fill(NaN);
  let sum: number | null = null;
  for (let i = rewards.length - 1; i >= 0; i--) {
    if ((learned && !learned[i]) || (sum === null && Number.isNaN(rewards[i]))) continue;
    sum = rewards[i]! + gamma * (sum ?? 0);
    result[i] = sum;
  }
  return result;
}

export function available(columns: readonly string[]): TokenMetric[] {
  return TOKEN_METRICS.filter((metric) => metric.needs.every((need) => columns.includes(need)));
}

/** The metric's values; NaN where it was not measured, and for tokens that were not learned. */
export function tokenValues(metric: TokenMetric, columns: TokenColumns, gamma: number): Float32Array {
  const values = metric.compute(columns, gamma);
  const learned = columns["learned"];
  if (learned) for (let i = 0; i < values.length; i++) if (!learned[i]) values[i] = NaN;
  return values;
}
