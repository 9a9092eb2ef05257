/** The tokens of one rollout: binary columns beside their texts. */

import type { Key } from "../i18n";
import { templated } from "../maths/conversation";
import { joinTokens, type Unit } from "../maths/units";
import { available, type TokenColumns, type TokenMetric } from "../maths/metrics";
import { address, getBytes, getJson } from "./client";
import { progressOf } from "./progress";
import type { Progress, RolloutKey, Rollout, TokenColumn, TokenTexts, Turn } from "./types";

export interface Tokens {
  rollout: Rollout;
  count: number;
  units: Unit[];
  /** the unit of each token */
  unitOf: Int32Array;
  columns: TokenColumns;
  metrics: TokenMetric[];
  /** of the index, which names the rollouts beside it */
  partial: Progress | null;
}

/** Whether training learned from a token, and did not only read it, such as a tool's output. */
export const isLearned = ({ columns }: Tokens, token: number): boolean => columns["learned"]?.[token] !== 0;

/** Why training did not learn from a token, by the code of its source. */
const WHY: readonly Key[] = ["whyExcluded", "whyTemplate", "whyTool", "whyUser"];

/** Says why training did not learn from a token; null if it did. */
export function whyNotLearned(loaded: Tokens, token: number): Key | null {
  if (isLearned(loaded, token)) return null;
  return WHY[loaded.columns["source"]?.[token] ?? -1] ?? "whyMarked";
}

/** The first token of each turn, by turn; where no turns were recorded, of those that marks in the text tell apart. */
export function turnStarts({ rollout, units, count }: Tokens): Map<number, Turn> {
  const recorded = rollout.conversation ?? [];
  if (recorded.length > 0)
    return new Map(recorded.flatMap((turn) => (inside(turn.first_token, count) ? [[turn.first_token!, turn]] : [])));
  const starts = new Map<number, Turn>();
  const turns = templated(units.map(({ text }) => text).join(""), "assistant") ?? [];
  let [next, at] = [0, 0];
  for (const { text, first } of units) {
    const turn = turns[next];
    if (turn && turn.at < at + text.length) {
      starts.set(first, { role: turn.role, text: turn.text });
      next++;
    }
    at += text.length;
  }
  return starts;
}

const inside = (token: number | null | undefined, count: number): boolean =>
  token != null && token >= 0 && token < count;

/** Where one rollout is. */
export const rolloutAddress = (run: string, { step, sample }: RolloutKey): string =>
  address(`runs/${run}/rollouts/${step}/${sample}`);

/** @param path runs/RUN/rollouts/STEP/SAMPLE */
export async function loadTokens(path: string): Promise<Tokens> {
  // The three are asked for at once; a rollout without tokens answers the last two with nothing.
  const [rollout, texts, bytes] = await Promise.all([
    getJson<Rollout>(address(path)),
    getJson<TokenTexts>(address(`${path}/texts`)),
    getBytes(address(`${path}/tokens`)),
  ]);
  const count = rollout.tokens?.count ?? 0;
  const columns = rollout.tokens ? decoded(bytes, rollout.tokens.columns, count) : {};
  const units = joinTokens(texts.texts, texts.bytes);
  const unitOf = new Int32Array(texts.texts.length);
  units.forEach((unit, i) => unitOf.fill(i, unit.first, unit.first + unit.count));
  return {
    rollout,
    count,
    units,
    unitOf,
    columns,
    metrics: available(Object.keys(columns)),
    partial: progressOf(rollout),
  };
}

const VIEWS = { float32: Float32Array, int32: Int32Array, uint8: Uint8Array };

/** Columns stand one after another, little-endian like every machine that runs a browser. */
export function decoded(bytes: ArrayBuffer, columns: TokenColumn[], count: number): TokenColumns {
  return Object.fromEntries(columns.map(({ name, dtype, offset }) => [name, new VIEWS[dtype](bytes, offset, count)]));
}
