/** A small curve beside a number, and a range around a number: as SVG, because tables have a hundred of them. */

import type { Maybe } from "../maths/numbers";

const WIDE = 200;
const TALL = 22;

interface SparkProps {
  values: Maybe[];
  high: number;
  label: string;
}

export function Spark({ values, high, label }: SparkProps) {
  const points = values.flatMap((value, i) => {
    if (value === null) return [];
    const x = 2 + (i / Math.max(1, values.length - 1)) * (WIDE - 4);
    return [`${x.toFixed(1)},${(TALL - 2 - (value / (high || 1)) * (TALL - 5)).toFixed(1)}`];
  });
  const last = points[points.length - 1] ?? "";
  const closed = [`2,${TALL - 1}`, ...points, `${last.split(",")[0]},${TALL - 1}`];
  return (
    <svg class="spark" viewBox={`0 0 ${WIDE} ${TALL}`} preserveAspectRatio="none" role="img" aria-label={label}>
      {points.length > 0 && (
        <>
          <polygon class="under" points={closed.join(" ")} />
          <polyline points={points.join(" ")} />
          <path class="end" d={`M${last}h0`} />
        </>
      )}
    </svg>
  );
}

/** Two curves over the same steps, on one scale. */
export function Two({ first, second, label }: { first: Maybe[]; second: Maybe[]; label: string }) {
  const known = [...first, ...second].filter((value) => value !== null);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const line = (values: Maybe[]): string =>
    values
      .flatMap((value, i) => {
        if (value === null) return [];
        const x = 2 + (i / Math.max(1, values.length - 1)) * (WIDE - 4);
        return [`${x.toFixed(1)},${(TALL - 2 - ((value - low) / (high - low || 1)) * (TALL - 5)).toFixed(1)}`];
      })
      .join(" ");
  return (
    <svg class="spark pair" viewBox={`0 0 ${WIDE} ${TALL}`} preserveAspectRatio="none" role="img" aria-label={label}>
      <polyline class="rest" points={line(second)} />
      <polyline points={line(first)} />
    </svg>
  );
}

interface WhiskerProps {
  value: Maybe;
  interval: [number, number] | null;
  /** the number at either end of the scale, which is symmetric about zero */
  most: number;
  label: string;
}

export function Whisker({ value, interval, most, label }: WhiskerProps) {
  const x = (at: number): string =>
    (WIDE / 2 + (Math.max(-1, Math.min(1, at / (most || 1))) * (WIDE - 8)) / 2).toFixed(1);
  return (
    <svg
      class={`spark ${(value ?? 0) < 0 ? "below" : ""}`}
      viewBox={`0 0 ${WIDE} ${TALL}`}
      preserveAspectRatio="none"
      role="img"
      aria-label={label}
    >
      <path class="zero" d={`M${WIDE / 2},3V${TALL - 3}`} />
      {value !== null && interval && <path d={`M${x(interval[0])},${TALL / 2}H${x(interval[1])}`} />}
      {value !== null && <path class="end" d={`M${x(value)},${TALL / 2}h0`} />}
    </svg>
  );
}
