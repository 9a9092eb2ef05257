/** Frames for small charts: where the picture lies, and its ticks. */

import { number } from "../maths/format";
import { ticks } from "../maths/numbers";
import type { Palette } from "./palette";
import type { Pen } from "./pen";

export interface Frame {
  left: number;
  top: number;
  right: number;
  bottom: number;
}

export type Place = (value: number) => number;

/** Pixels of a digit, and those that every frame leaves free on its right. */
const DIGIT = 6;
const MARGIN = 10;

export function horizontal(frame: Frame, low: number, high: number): Place {
  return (value) => frame.left + ((value - low) / (high - low || 1)) * (frame.right - frame.left);
}

export function vertical(frame: Frame, low: number, high: number): Place {
  return (value) => frame.bottom - ((value - low) / (high - low || 1)) * (frame.bottom - frame.top);
}

export function bottomAxis(pen: Pen, frame: Frame, low: number, high: number, colours: Palette): void {
  const place = horizontal(frame, low, high);
  pen.line(
    [
      [frame.left, frame.bottom + 0.5],
      [frame.right, frame.bottom + 0.5],
    ],
    { colour: colours.line },
  );
  for (const tick of ticks(low, high, Math.max(2, (frame.right - frame.left) / 70))) {
    const x = place(tick);
    pen.line(
      [
        [x, frame.bottom],
        [x, frame.bottom + 4],
      ],
      { colour: colours.line },
    );
    const label = number(tick);
    const middle = Math.min(x, frame.right + MARGIN - (label.length * DIGIT) / 2);
    pen.text(middle, frame.bottom + 15, label, { colour: colours.muted, size: 10.5, align: "center" });
  }
}

export function leftAxis(
  pen: Pen,
  frame: Frame,
  low: number,
  high: number,
  colours: Palette,
  label: (value: number) => string = number,
): void {
  const place = vertical(frame, low, high);
  for (const tick of ticks(low, high, Math.max(2, (frame.bottom - frame.top) / 36))) {
    const y = place(tick);
    pen.line(
      [
        [frame.left, y],
        [frame.right, y],
      ],
      { colour: colours.line },
    );
    pen.text(frame.left - 6, y + 3.5, label(tick), { colour: colours.muted, size: 10.5, align: "right" });
  }
}
