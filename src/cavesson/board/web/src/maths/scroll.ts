/**
 * Scrolling over more rows than a browser can make an element tall.
 *
 * The scroll bar covers at most TALLEST pixels. Small moves go pixel by pixel; a drag of the bar jumps in proportion;
 * whenever the bar comes to rest it is put back to where its place in the whole is.
 */

/** Firefox stops at 17.9 million pixels, Chromium at 33.5 million. */
export const TALLEST = 8_000_000;

export interface Extent {
  /** pixels of all rows together */
  whole: number;
  /** pixels in view */
  view: number;
}

export function barHeight(extent: Extent): number {
  return Math.min(extent.whole, TALLEST);
}

function ends({ whole, view }: Extent): { bar: number; top: number } {
  return { bar: Math.max(0, Math.min(whole, TALLEST) - view), top: Math.max(0, whole - view) };
}

/** Where the rows are after the bar moved from `before` to `bar` while the rows were at `top`. */
export function topAfter(extent: Extent, top: number, before: number, bar: number): number {
  const most = ends(extent);
  if (most.bar === most.top) return Math.min(Math.max(0, bar), most.top);
  if (bar <= 0) return 0;
  if (bar >= most.bar) return most.top;
  const small = Math.abs(bar - before) <= 2 * extent.view;
  return small ? Math.min(most.top, Math.max(0, top + bar - before)) : (bar / most.bar) * most.top;
}

/** Where the bar belongs when the rows are at `top`; never at its ends unless the rows are. */
export function barAt(extent: Extent, top: number): number {
  const most = ends(extent);
  if (most.top === 0 || top <= 0) return 0;
  if (top >= most.top) return most.bar;
  if (most.bar === most.top) return top;
  return Math.min(most.bar - 2, Math.max(2, Math.round((top / most.top) * most.bar)));
}

/** Where a bar that came to rest at `bar` is put: nowhere else if its handle would not be seen to move. */
export function barAtRest(extent: Extent, top: number, bar: number): number {
  const right = barAt(extent, top);
  const room = Math.min(bar, ends(extent).bar - bar);
  const seen = Math.abs(right - bar) > barHeight(extent) / extent.view;
  // Near an end it is put exactly, so that it does not come there before the rows do.
  return seen || room <= 2 * extent.view ? right : bar;
}
