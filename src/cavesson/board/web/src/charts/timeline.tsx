/** The run in one strip, on every view: its reward, the doctor's findings, search hits, and the step looked at. */

import { useCallback, useState } from "preact/hooks";
import { onRest } from "../api/client";
import type { Diagnosis, Finding, Hits, Series, Steps } from "../api/types";
import { useText } from "../i18n";
import { stepsOf } from "../maths/findings";
import { number, whole } from "../maths/format";
import { clamp, finite } from "../maths/numbers";
import { nearestStep, pairs, placeOf } from "../maths/series";
import type { Position } from "./axes";
import { type Palette, usePalette } from "./palette";
import type { Pen, Point } from "./pen";
import { Picture } from "./picture";

interface Props {
  series: Series;
  step: number;
  diagnosis: Diagnosis;
  hits: Hits | null;
  onStep: (step: number) => void;
  /** when the pointer rests on a step */
  onPoint: (step: number) => void;
}

const HEIGHT = 44;
const EDGE = 10;

export function Timeline({ series, step, diagnosis, hits, onStep, onPoint }: Props) {
  const t = useText();
  const colours = usePalette();
  const [hover, setHover] = useState<number | null>(null);
  const steps = series.step;
  const points = pairs(series);
  const [start, end] = [steps[0] ?? 0, points.at(-1)?.[1] ?? 0];
  const stepAt = (x: number, width: number): number => {
    const value = start + ((x - EDGE) / (width - 2 * EDGE)) * (end - start);
    return nearestStep(points, clamp(value, start, end));
  };
  const curve = useCallback(
    (pen: Pen, width: number, height: number): void => draw(pen, width, height, { series, diagnosis, hits }, colours),
    [series, diagnosis, hits, colours],
  );
  const place = (at: number) => ({ left: `${(100 * (at - start)) / (end - start || 1)}%` });
  const shown = hover ?? step;
  const at = placeOf(steps, shown);
  const recorded = points[at] && shown >= points[at][0] && shown <= points[at][1];
  const reward = recorded && series.rollups["reward"]?.mean[at];
  const searched = hits?.step.indexOf(shown) ?? -1;
  const found = diagnosis.findings.filter((finding) => {
    const lasts = stepsOf(finding, diagnosis);
    return lasts && shown >= lasts[0] && shown <= lasts[1];
  });
  return (
    <div class="timeline">
      <Picture
        height={HEIGHT}
        label={t("timeline")}
        draw={curve}
        onPoint={(x, _, width) => {
          const at = x === null ? null : stepAt(x, width);
          setHover(at);
          if (at !== null && at !== step) onRest(() => onPoint(at));
        }}
        onClick={(x, _, width) => onStep(stepAt(x, width))}
      />
      <div class="needles" style={{ left: `${EDGE}px`, right: `${EDGE}px` }}>
        {hover !== null && <i class="pointed" style={place(hover)} />}
        {step >= start && step <= end && <i class="chosen" style={place(step)} />}
      </div>
      <output class={hover === null ? "" : "hovered"}>
        {t("step")} <b>{shown}</b>
        <span>
          {t("reward")} {number(reward, 3)}
        </span>
        {searched >= 0 && (
          <span class="warning">
            {t("hitsOf", { hits: whole(hits!.hits[searched]), rows: whole(hits!.rows[searched]) })}
          </span>
        )}
        {found.length > 0 && <span class={found[0]!.severity}>{found[0]!.title}</span>}
      </output>
    </div>
  );
}

interface Shown {
  series: Series;
  diagnosis: Diagnosis;
  hits: Hits | null;
}

function draw(pen: Pen, width: number, height: number, shown: Shown, colours: Palette): void {
  const { series, diagnosis, hits } = shown;
  const steps = series.step;
  const rollup = series.rollups["reward"];
  if (steps.length === 0 || !rollup) return;
  const [first, last] = [steps[0]!, pairs(series).at(-1)![1]];
  const x = (at: number): number => EDGE + ((at - first) / (last - first || 1)) * (width - 2 * EDGE);
  const values = finite([...rollup.q25, ...rollup.q75, ...rollup.mean]);
  const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  const y = (value: number): number => height - 7 - ((value - low!) / (high! - low! || 1)) * (height - 14);
  const points = (list: (number | null)[]): Point[] =>
    list.flatMap((value, i): Point[] => (value === null ? [] : [[x(steps[i]!), y(value)]]));
  pen.area([...points(rollup.q75), ...points(rollup.q25).reverse()], `${colours.accent}1c`);
  pen.line(points(rollup.mean), { colour: colours.accent, width: 1.3 });
  if (hits) drawHits(pen, height, hits, x, colours);
  for (const finding of diagnosis.findings) {
    const lasts = stepsOf(finding, diagnosis);
    if (lasts) drawFinding(pen, height, finding.severity, lasts, x, colours);
  }
}

function drawHits(pen: Pen, height: number, hits: Hits, x: Position, colours: Palette): void {
  const shares = hits.step.map((_, i) => (hits.rows[i] ? hits.hits[i]! / hits.rows[i]! : 0));
  const most = Math.max(...shares, 1e-9);
  shares.forEach((share, i) => {
    const tall = (share / most) * (height - 10);
    if (share > 0) pen.rect(x(hits.step[i]!) - 1.5, height - 1 - tall, 3, tall, `${colours.warm}aa`);
  });
}

function drawFinding(
  pen: Pen,
  height: number,
  severity: Finding["severity"],
  steps: Steps,
  x: Position,
  colours: Palette,
): void {
  const colour = { error: colours.bad, warning: colours.warm, note: colours.muted }[severity];
  pen.rect(x(steps[0]) - 1, height - 3, Math.max(3, x(steps[1]) - x(steps[0]) + 2), 3, colour);
}
