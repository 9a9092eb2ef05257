/** How strongly, and on which side of zero, a number colours its token. */

import { limits } from "./numbers";
import type { Kind } from "./metrics";

export interface Scale {
  kind: Kind;
  low: number;
  high: number;
}

export function scaleOf(kind: Kind, values: ArrayLike<number>): Scale {
  if (kind === "fraction") return { kind, low: 0, high: 1 };
  const [low, high] = limits(sampled(values), kind === "signed");
  if (kind === "positive") return { kind, low: 0, high: Math.max(high, 1e-12) };
  if (kind === "surprise") return { kind, low: Math.min(low, -1e-12), high: 0 };
  return { kind, low, high };
}

/** So many values, evenly spread over the response, tell where the colours of a longer one should end. */
const ENOUGH = 4096;

function sampled(values: ArrayLike<number>): ArrayLike<number> {
  if (values.length <= ENOUGH) return values;
  const found = new Float32Array(ENOUGH);
  for (let i = 0; i < ENOUGH; i++) found[i] = values[Math.floor((i * values.length) / ENOUGH)]!;
  return found;
}

/** −1 to 1: the sign chooses the hue, the size the strength; NaN stays NaN. Beyond the limits it stops at ±1. */
export function strength(scale: Scale, value: number): number {
  const span = scale.kind === "surprise" ? scale.low : scale.high;
  return Math.max(-1, Math.min(1, value / span));
}

export type Hues = Record<"positive" | "negative" | "surprise" | "fraction", string>;

/**
 * The colour of a value as #rrggbbaa over whatever lies behind, or null where nothing was measured.
 *
 * @param strongest alpha of the strongest tint, of 255
 */
export function tint(scale: Scale, value: number, hues: Hues, strongest = STRONGEST): string | null {
  if (Number.isNaN(value)) return null;
  const amount = strength(scale, value);
  const hue =
    scale.kind === "fraction"
      ? hues.fraction
      : scale.kind === "surprise"
        ? hues.surprise
        : amount < 0
          ? hues.negative
          : hues.positive;
  return shades(hue)[Math.round(Math.abs(amount) * strongest)]!;
}

/** Text keeps a contrast of 4.5 : 1 on the strongest tint. */
export const STRONGEST = 184;

/** So does grey text on this one. */
export const PALE = 40;

const known = new Map<string, string[]>();

/** Every strength of a hue, made once: long responses ask a hundred thousand times. */
function shades(hue: string): string[] {
  let found = known.get(hue);
  if (!found) {
    found = Array.from({ length: STRONGEST + 1 }, (_, alpha) => hue + alpha.toString(16).padStart(2, "0"));
    known.set(hue, found);
  }
  return found;
}
