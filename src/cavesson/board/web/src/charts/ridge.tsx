/** A distribution over the run: one ridge per stretch of steps, the first at the top. */

import { useCallback } from "preact/hooks";
import { Card } from "../parts/card";
import { useText } from "../i18n";
import type { Ridge } from "../api/types";
import { bottomAxis, type Frame, horizontal } from "./axes";
import { type Palette, usePalette } from "./palette";
import { SvgPen, type Pen, type Point } from "./pen";
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

/** A ridge may reach this many rows up. */
const REACH = 2.4;

export function RidgeChart(props: Props) {
  const { title, hint, ridge, height, step, heat, onHeat, onStep } = props;
  const t = useText();
  const colours = usePalette();
  const render = heat ? drawHeat : drawRidges;
  const chosen = ridge.steps.findIndex(([first, last]) => step >= first && step <= last);
  const draw = useCallback(
    (pen: Pen, width: number, tall: number): void => render(pen, width, tall, ridge, chosen, colours, 8),
    [render, ridge, chosen, colours],
  );
  const pick = (_: number, y: number, width: number): void => {
    const frame = frameOf(width, height);
    const row = Math.floor(((y - frame.top) / (frame.bottom - frame.top)) * ridge.steps.length);
    const steps = ridge.steps[row];
    if (steps) onStep(steps[1]);
  };
  const save = (): [string, number, number] => {
    const pen = new SvgPen(colours.sans);
    pen.text(16, 22, title, { colour: colours.ink, size: 15, bold: true });
    render(pen, 640, 560, ridge, chosen, colours, 40);
    return [pen.svg(640, 560, colours.surface), 640, 560];
  };
  const toggle = (
    <button type="button" class="quiet" onClick={() => onHeat(!heat)}>
      {heat ? t("asRidges") : t("asHeat")}
    </button>
  );
  return (
    <Card title={title} hint={hint} save={save} actions={toggle}>
      {ridge.counts.flat().some((count) => count > 0) ? (
        <Picture draw={draw} height={height} label={title} onClick={pick} />
      ) : (
        <p class="empty">{t("noNumbers")}</p>
      )}
    </Card>
  );
}

const frameOf = (width: number, height: number, top = 8): Frame => ({
  left: 52,
  top,
  right: width - 10,
  bottom: height - 20,
});

function drawRidges(
  pen: Pen,
  width: number,
  height: number,
  ridge: Ridge,
  chosen: number,
  colours: Palette,
  top: number,
): void {
  const frame = frameOf(width, height, top);
  const { edges, steps, counts } = ridge;
  const row = (frame.bottom - frame.top) / (steps.length + REACH - 1);
  const x = horizontal(frame, edges[0]!, edges[edges.length - 1]!);
  const densities = counts.map(share);
  const tallest = Math.max(...densities.flat(), 1e-9);
  bottomAxis(pen, frame, edges[0]!, edges[edges.length - 1]!, colours);
  densities.forEach((density, i) => {
    const base = frame.top + (i + REACH) * row;
    const points: Point[] = density.map((value, bin) => [
      (x(edges[bin]!) + x(edges[bin + 1]!)) / 2,
      base - (value / tallest) * REACH * row,
    ]);
    const closed: Point[] = [[frame.left, base], ...points, [frame.right, base]];
    pen.area(closed, colours.surface);
    pen.area(closed, colours.accent + (i === chosen ? "66" : hex(0.08 + (0.22 * i) / steps.length)));
    pen.line(points, { colour: i === chosen ? colours.accent : colours.muted, width: i === chosen ? 1.8 : 0.9 });
  });
  label(pen, frame, steps, chosen, (i) => frame.top + (i + REACH) * row, colours);
}

function drawHeat(
  pen: Pen,
  width: number,
  height: number,
  ridge: Ridge,
  chosen: number,
  colours: Palette,
  top: number,
): void {
  const frame = frameOf(width, height, top);
  const { edges, steps, counts } = ridge;
  const row = (frame.bottom - frame.top) / steps.length;
  const x = horizontal(frame, edges[0]!, edges[edges.length - 1]!);
  bottomAxis(pen, frame, edges[0]!, edges[edges.length - 1]!, colours);
  const densities = counts.map(share);
  const tallest = Math.max(...densities.flat(), 1e-9);
  densities.forEach((density, i) =>
    density.forEach((value, bin) => {
      const left = x(edges[bin]!);
      if (value > 0) {
        const strength = hex(Math.sqrt(value / tallest));
        pen.rect(left, frame.top + i * row, x(edges[bin + 1]!) - left + 0.3, row + 0.3, colours.accent + strength);
      }
    }),
  );
  label(pen, frame, steps, chosen, (i) => frame.top + (i + 1) * row, colours);
}

function label(
  pen: Pen,
  frame: Frame,
  steps: Ridge["steps"],
  chosen: number,
  y: (i: number) => number,
  colours: Palette,
): void {
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

function share(counts: number[]): number[] {
  const total = counts.reduce((sum, count) => sum + count, 0) || 1;
  return counts.map((count) => count / total);
}
