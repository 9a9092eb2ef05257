/** What the parts of the token view share. */

import type { Tokens } from "../api/tokens";
import { type Scale, scaleOf } from "../maths/colour";
import { type TokenMetric, tokenValues } from "../maths/metrics";

/** A metric of all tokens; computed when it is first looked at, as a long response has many numbers. */
export interface Measured {
  metric: TokenMetric;
  readonly values: Float32Array;
  readonly scale: Scale;
}

export function measure(loaded: Tokens, gamma: number): Measured[] {
  return loaded.metrics.map((metric) => {
    let values: Float32Array | null = null;
    let scale: Scale | null = null;
    return {
      metric,
      get values() {
        return (values ??= tokenValues(metric, loaded.columns, gamma));
      },
      get scale() {
        return (scale ??= scaleOf(metric.kind, this.values));
      },
    };
  });
}

export interface Looked {
  /** under the pointer */
  token: number | null;
  /** clicked, or walked to with the arrow keys */
  pinned: number | null;
  /** counts up when the pinned token has to be brought into view */
  reveal: number;
}
