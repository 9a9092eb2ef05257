/** Step × position: the mean of a token metric over the whole run. */

import { useCallback, useState } from "preact/hooks";
import { Card } from "../parts/card";
import type { ComponentChildren } from "preact";
import type { Heat } from "../api/types";
import { tint, type Scale } from "../maths/colour";
import { number, whole } from "../maths/format";
import { type Frame } from "./axes";
import { type Palette, usePalette } from "./palette";
import { type Pen, straight, svgOf } from "./pen";
import { Picture } from "./picture";
import { useText } from "../i18n";

interface Props {
  title: string;
  hint?: string | undefined;
  heat: Heat;
  scale: () => Scale;
  step: number;
  onStep: (step: number) => void;
  actions?: ComponentChildren;
}

const HEIGHT = 260;

export function HeatChart({ title, hint, heat, scale, step, onStep, actions }: Props) {
  const t = useText();
  const colours = usePalette();
  const chosen = heat.steps.findIndex(([first, last]) => step >= first && step <= last);
  const draw = useCallback(
    (pen: Pen, width: number, height: number): void =>
      drawHeat(pen, frameOf(width, height), heat, scale(), chosen, colours),
    [heat, scale, chosen, colours],
  );
  const [cell, setCell] = useState<[column: number, row: number] | null>(null);
  const at = (x: number, y: number, width: number): [number, number] => {
    const frame = frameOf(width, HEIGHT);
    return [
      Math.floor(((x - frame.left) / (frame.right - frame.left)) * heat.steps.length),
      Math.floor(((y - frame.top) / (frame.bottom - frame.top)) * heat.positions.length),
    ];
  };
  const drawFile = (pen: Pen): void => drawHeat(pen, frameOf(800, 400, 36), heat, scale(), chosen, colours);
  const steps = cell && heat.steps[cell[0]];
  const positions = cell && heat.positions[cell[1]];
  const told =
    steps && positions
      ? t("heatCell", {
          steps: range(steps),
          positions: range(positions),
          mean: number(heat.mean[cell[0]]?.[cell[1]]),
          count: whole(heat.count[cell[0]]?.[cell[1]]),
        })
      : "";
  return (
    <Card title={title} hint={hint} save={() => svgOf(800, 400, colours, drawFile, title)} actions={actions}>
      <Picture
        draw={draw}
        height={HEIGHT}
        label={title}
        onPoint={(x, y, width) => setCell(x === null ? null : at(x, y, width))}
        onClick={(x, y, width) => {
          const steps = heat.steps[at(x, y, width)[0]];
          if (steps) onStep(steps[1]);
        }}
      />
      <p class="told">{told || "\u00a0"}</p>
    </Card>
  );
}

const range = ([first, last]: readonly [number, number]): string =>
  first === last ? String(first) : `${first}–${last}`;

function frameOf(width: number, height: number, top = 8): Frame {
  return { left: 46, top, right: width - 10, bottom: height - 22 };
}

function drawHeat(pen: Pen, frame: Frame, heat: Heat, scale: Scale, chosen: number, colours: Palette): void {
  const wide = (frame.right - frame.left) / Math.max(1, heat.steps.length);
  const tall = (frame.bottom - frame.top) / Math.max(1, heat.positions.length);
  heat.mean.forEach((column, i) =>
    column.forEach((value, j) => {
      const colour = value === null ? null : tint(scale, value, colours.hues);
      if (colour) pen.rect(frame.left + i * wide, frame.top + j * tall, wide + 0.3, tall + 0.3, colour);
    }),
  );
  const words = { colour: colours.muted, size: 10.5 };
  const everyRow = Math.ceil(heat.positions.length / 8);
  heat.positions.forEach(([first], j) => {
    if (j % everyRow === 0)
      pen.text(frame.left - 6, frame.top + (j + 0.5) * tall + 4, String(first), { ...words, align: "right" });
  });
  const everyColumn = Math.ceil(heat.steps.length / Math.max(1, (frame.right - frame.left) / 56));
  heat.steps.forEach(([first], i) => {
    const x = frame.left + (i + 0.5) * wide;
    if (i % everyColumn === 0) pen.text(x, frame.bottom + 14, String(first), { ...words, align: "center" });
    if (i !== chosen) return;
    for (const edge of [x - wide / 2, x + wide / 2])
      straight(pen, [edge, frame.top], [edge, frame.bottom], { colour: colours.accent });
  });
}
