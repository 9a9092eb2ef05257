/** A distribution over the run: one ridge per stretch of steps, the first at the top. */

import { useCallback } from "preact/hooks";
import { Card } from "../parts/card";
import { useText } from "../i18n";
import type { Ridge, Steps } from "../api/types";
import { REACH, rowAt } from "../maths/ridge";
import { bottomAxis, type Frame, horizontal, type Position } from "./axes";
import { type Palette, usePalette } from "./palette";
import { type Pen, type Point, svgOf } from "./pen";
import { Picture } from "./picture";

interface Props {
  title: string;
  hint?: string | undefined;
  ridge: Ridge;
  height: number;
  step: number;
  /** as a heat map instead of ridges */
  heat: boolean;
  onHeat: (heat: boolean) => void;
  onStep: (step: number) => void;
}

export function RidgeChart(props: Props) {
  const { title, hint, ridge, height, step, heat, onHeat, onStep } = props;
  const t = useText();
  const colours = usePalette();
  const render = heat ? drawHeat : drawRidges;
  const chosen = ridge.steps.findIndex(([first, last]) => step >= first && step <= last);
  const draw = useCallback(
    (pen: Pen, width: number, tall: number): void => render(pen, frameOf(width, tall), ridge, chosen, colours),
    [render, ridge, chosen, colours],
  );
  const pick = (_: number, y: number, width: number): void => {
    const frame = frameOf(width, height);
    const steps = ridge.steps[rowAt((y - frame.top) / (frame.bottom - frame.top), ridge.steps.length, heat)];
    if (steps) onStep(steps[1]);
  };
  const drawFile = (pen: Pen): void => render(pen, frameOf(640, 560, 40), ridge, chosen, colours);
  const toggle = (
    <button type="button" class="quiet" onClick={() => onHeat(!heat)}>
      {heat ? t("asRidges") : t("asHeat")}
    </button>
  );
  return (
    <Card title={title} hint={hint} save={() => svgOf(640, 560, colours, drawFile, title)} actions={toggle}>
      {ridge.counts.flat().some((count) => count > 0) ? (
        <Picture draw={draw} height={height} label={title} onClick={pick} />
      ) : (
        <p class="empty">{t("noNumbers")}</p>
      )}
    </Card>
  );
}

function frameOf(width: number, height: number, top = 8): Frame {
  return { left: 52, top, right: width - 10, bottom: height - 20 };
}

/** Draws the axis; the pixel of each edge of a bin, and by stretch of steps how tall each bin is beside the tallest. */
function prepared(
  pen: Pen,
  frame: Frame,
  { edges, counts }: Ridge,
  colours: Palette,
): [x: number[], parts: number[][]] {
  const [low, high] = [edges[0]!, edges[edges.length - 1]!];
  bottomAxis(pen, frame, low, high, colours);
  const shares = counts.map((bins) => {
    const total = bins.reduce((sum, count) => sum + count, 0) || 1;
    return bins.map((count) => count / total);
  });
  const tallest = Math.max(...shares.flat(), 1e-9);
  return [edges.map(horizontal(frame, low, high)), shares.map((bins) => bins.map((share) => share / tallest))];
}

function drawRidges(pen: Pen, frame: Frame, ridge: Ridge, chosen: number, colours: Palette): void {
  const { steps } = ridge;
  const row = (frame.bottom - frame.top) / (steps.length + REACH - 1);
  const [x, parts] = prepared(pen, frame, ridge, colours);
  parts.forEach((part, i) => {
    const base = frame.top + (i + REACH) * row;
    const points = part.map((tall, bin): Point => [(x[bin]! + x[bin + 1]!) / 2, base - tall * REACH * row]);
    const closed: Point[] = [[frame.left, base], ...points, [frame.right, base]];
    pen.area(closed, colours.surface);
    pen.area(closed, colours.accent + (i === chosen ? "66" : hex(0.08 + (0.22 * i) / steps.length)));
    pen.line(points, { colour: i === chosen ? colours.accent : colours.muted, width: i === chosen ? 1.8 : 0.9 });
  });
  label(pen, frame, steps, chosen, (i) => frame.top + (i + REACH) * row, colours);
}

function drawHeat(pen: Pen, frame: Frame, ridge: Ridge, chosen: number, colours: Palette): void {
  const { steps } = ridge;
  const row = (frame.bottom - frame.top) / steps.length;
  const [x, parts] = prepared(pen, frame, ridge, colours);
  parts.forEach((part, i) =>
    part.forEach((tall, bin) => {
      if (tall <= 0) return;
      const colour = colours.accent + hex(Math.sqrt(tall));
      pen.rect(x[bin]!, frame.top + i * row, x[bin + 1]! - x[bin]! + 0.3, row + 0.3, colour);
    }),
  );
  label(pen, frame, steps, chosen, (i) => frame.top + (i + 1) * row, colours);
}

function label(pen: Pen, frame: Frame, steps: Steps[], chosen: number, y: Position, colours: Palette): void {
  const every = Math.ceil(steps.length / Math.max(1, (frame.bottom - frame.top) / 14));
  steps.forEach(([first, last], i) => {
    if (i % every !== 0 && i !== chosen) return;
    const text = first === last ? String(first) : `${first}–${last}`;
    pen.text(frame.left - 8, y(i), text, {
      colour: i === chosen ? colours.accent : colours.muted,
      size: 10,
      align: "right",
      bold: i === chosen,
    });
  });
}

const hex = (share: number): string =>
  Math.round(Math.min(1, share) * 255)
    .toString(16)
    .padStart(2, "0");
