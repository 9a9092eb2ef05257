/** Statistics of plain number lists. NaN and null stand for "not measured" and are left out everywhere. */

export type Maybe = number | null;

export function finite(values: ArrayLike<number | null>): Float64Array {
  const kept = new Float64Array(values.length);
  let count = 0;
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (value != null && Number.isFinite(value)) kept[count++] = value;
  }
  return kept.subarray(0, count);
}

/** The p-quantile of ascending values, interpolated linearly (Hyndman and Fan 1996, type 7). */
export function quantile(sorted: ArrayLike<number>, p: number): number {
  if (sorted.length === 0) return NaN;
  const place = (sorted.length - 1) * p;
  const low = Math.floor(place);
  const a = sorted[low]!;
  const b = sorted[Math.min(low + 1, sorted.length - 1)]!;
  return a + (b - a) * (place - low);
}

/**
 * Colour limits that single outliers do not move: the extremes of what lies within three interquartile ranges of the
 * quartiles (Tukey 1977, the outer fences). Signed quantities get limits symmetric about zero.
 */
export function limits(values: ArrayLike<number | null>, signed: boolean): [low: number, high: number] {
  const kept = finite(values);
  if (signed) {
    const [, high] = fenced(kept.map(Math.abs));
    return [-high, high];
  }
  return fenced(kept);
}

function fenced(values: Float64Array): [number, number] {
  if (values.length === 0) return [0, 1];
  const [low, high] = usualRange(values);
  return low === high ? [Math.min(0, low), Math.max(0, high) || 1] : [low, high];
}

/** The extremes of what lies within the outer fences; of values that are mostly one number, with those of the rest. */
export function usualRange(values: Float64Array): [low: number, high: number] {
  const sorted = values.slice().sort();
  const [low, high] = withinFences(sorted);
  // More than half of the values are one number (sparse rewards): the fences closed on it, so judge the rest alone.
  return low === high ? union([low, high], withinFences(sorted.filter((value) => value !== low))) : [low, high];
}

function withinFences(sorted: Float64Array): [number, number] {
  if (sorted.length === 0) return [NaN, NaN];
  const q1 = quantile(sorted, 0.25);
  const q3 = quantile(sorted, 0.75);
  const reach = 3 * (q3 - q1);
  const inside = sorted.filter((value) => value >= q1 - reach && value <= q3 + reach);
  return [inside[0]!, inside[inside.length - 1]!];
}

function union(a: [number, number], b: [number, number]): [number, number] {
  return Number.isNaN(b[0]) ? a : [Math.min(a[0], b[0]), Math.max(a[1], b[1])];
}

/** Exponential moving average that starts unbiased (Kingma and Ba 2015, section 3) and steps over gaps. */
export function smooth(values: readonly Maybe[], weight: number): Maybe[] {
  if (weight <= 0) return values.slice();
  let average = 0;
  let share = 0;
  return values.map((value) => {
    if (value == null || !Number.isFinite(value)) return null;
    average = weight * average + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return average / share;
  });
}

/** Values minus the first measured one. */
export function fromZero(values: readonly Maybe[]): Maybe[] {
  const first = values.find((value) => value != null) ?? 0;
  return values.map((value) => (value == null ? null : value - first));
}

/** Round numbers that split [low, high] into about `count` parts, at 1, 2 or 5 times a power of ten. */
export function ticks(low: number, high: number, count: number): number[] {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const factor = [1, 2, 5, 10].find((candidate) => candidate * power >= rough * 0.999)!;
  const step = factor * power;
  const found: number[] = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i === 0 ? 0 : i * step);
  return found;
}

/** The places to draw of a long curve: of each pixel the lowest and the highest value, in their order. */
export function thinned(values: ArrayLike<number>, pixels: number): number[] {
  const size = Math.max(1, Math.ceil(values.length / Math.max(1, pixels)));
  const kept: number[] = [];
  for (let start = 0; start < values.length; start += size) {
    let [low, high] = [-1, -1];
    for (let i = start; i < Math.min(start + size, values.length); i++) {
      const value = values[i]!;
      if (Number.isNaN(value)) continue;
      if (low < 0 || value < values[low]!) low = i;
      if (high < 0 || value > values[high]!) high = i;
    }
    if (low >= 0) kept.push(Math.min(low, high));
    if (high !== low) kept.push(Math.max(low, high));
  }
  return kept;
}

/** Places for labels, as near to `wanted` as they can be when each needs `room` and none may lie beyond `last`. */
export function apart(wanted: readonly number[], room: number, last: number): number[] {
  const order = wanted.map((_, i) => i).sort((a, b) => wanted[a]! - wanted[b]!);
  const placed = wanted.slice();
  let above = -Infinity;
  for (const i of order) above = placed[i] = Math.max(wanted[i]!, above + room);
  let below = last + room;
  for (const i of order.reverse()) below = placed[i] = Math.min(placed[i]!, below - room);
  return placed;
}

export function clamp(value: number, low: number, high: number): number {
  return Math.min(high, Math.max(low, value));
}
