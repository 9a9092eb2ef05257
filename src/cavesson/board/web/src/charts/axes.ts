/** Frames for small charts: where the picture lies, and its ticks. */

import { number } from "../maths/format";
import { ticks } from "../maths/numbers";
import type { Palette } from "./palette";
import { type Pen, straight } from "./pen";

export interface Frame {
  left: number;
  top: number;
  right: number;
  bottom: number;
}

export type Position = (value: number) => number;

/** Pixels of a digit, and those that every frame leaves free on its right. */
const DIGIT = 6;
const MARGIN = 10;

export function horizontal(frame: Frame, low: number, high: number): Position {
  return (value) => frame.left + ((value - low) / (high - low || 1)) * (frame.right - frame.left);
}

export function vertical(frame: Frame, low: number, high: number): Position {
  return (value) => frame.bottom - ((value - low) / (high - low || 1)) * (frame.bottom - frame.top);
}

export function bottomAxis(pen: Pen, frame: Frame, low: number, high: number, colours: Palette): void {
  const place = horizontal(frame, low, high);
  const [below, stroke] = [frame.bottom + 0.5, { colour: colours.line }];
  straight(pen, [frame.left, below], [frame.right, below], stroke);
  for (const tick of ticks(low, high, Math.max(2, (frame.right - frame.left) / 70))) {
    const x = place(tick);
    straight(pen, [x, frame.bottom], [x, frame.bottom + 4], stroke);
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
    straight(pen, [frame.left, y], [frame.right, y], { colour: colours.line });
    pen.text(frame.left - 6, y + 3.5, label(tick), { colour: colours.muted, size: 10.5, align: "right" });
  }
}
