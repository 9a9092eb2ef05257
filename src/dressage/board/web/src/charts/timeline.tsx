/** The run in one strip, on every view: its reward, the doctor's findings, search hits, and the step looked at. */

import { useState } from "preact/hooks";
import type { Finding, Hits, Series } from "../api/types";
import { useText } from "../i18n";
import { number, whole } from "../maths/format";
import { clamp, finite } from "../maths/numbers";
import { nearestStep, pairs, placeOf } from "../maths/series";
import { type Palette, usePalette } from "./palette";
import type { Pen, Point } from "./pen";
import { Picture } from "./picture";

interface Props {
  series: Series;
  step: number;
  findings: Finding[];
  hits: Hits | null;
  onStep: (step: number) => void;
}

const HEIGHT = 44;
const EDGE = 10;

export function Timeline({ series, step, findings, hits, onStep }: Props) {
  const t = useText();
  const colours = usePalette();
  const [hover, setHover] = useState<number | null>(null);
  const steps = series.step;
  const points = pairs(series);
  const stepAt = (x: number, width: number): number => {
    const [first, last] = [steps[0] ?? 0, points[points.length - 1]?.[1] ?? 0];
    const value = first + ((x - EDGE) / (width - 2 * EDGE)) * (last - first);
    return nearestStep(points, clamp(value, first, last));
  };
  const shown = hover ?? step;
  const reward = series.rollups["reward"]?.mean[placeOf(steps, shown)];
  const searched = hits?.step.indexOf(shown) ?? -1;
  const found = findings.filter((finding) => finding.steps && shown >= finding.steps[0] && shown <= finding.steps[1]);
  return (
    <div class="timeline">
      <Picture
        height={HEIGHT}
        label={t("timeline")}
        draw={(pen, width, height) => draw(pen, width, height, { series, findings, hits, step, hover }, colours)}
        onPoint={(x, _, width) => setHover(x === null ? null : stepAt(x, width))}
        onClick={(x, _, width) => onStep(stepAt(x, width))}
      />
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
  findings: Finding[];
  hits: Hits | null;
  step: number;
  hover: number | null;
}

function draw(pen: Pen, width: number, height: number, shown: Shown, colours: Palette): void {
  const { series, hits, step, hover } = shown;
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
  for (const finding of shown.findings) drawFinding(pen, height, finding, x, colours);
  if (hover !== null)
    pen.line(
      [
        [x(hover), 0],
        [x(hover), height],
      ],
      { colour: colours.muted, dash: [2, 2] },
    );
  pen.rect(x(step) - 0.75, 0, 1.5, height, colours.ink);
  pen.area(
    [
      [x(step) - 5, 0],
      [x(step) + 5, 0],
      [x(step), 6],
    ],
    colours.ink,
  );
}

function drawHits(pen: Pen, height: number, hits: Hits, x: (step: number) => number, colours: Palette): void {
  const shares = hits.step.map((_, i) => (hits.rows[i] ? hits.hits[i]! / hits.rows[i]! : 0));
  const most = Math.max(...shares, 1e-9);
  shares.forEach((share, i) => {
    if (share > 0)
      pen.rect(
        x(hits.step[i]!) - 1.5,
        height - 1 - (share / most) * (height - 10),
        3,
        (share / most) * (height - 10),
        `${colours.warm}aa`,
      );
  });
}

function drawFinding(
  pen: Pen,
  height: number,
  { steps, severity }: Finding,
  x: (step: number) => number,
  colours: Palette,
): void {
  if (!steps) return;
  const colour = { error: colours.bad, warning: colours.warm, note: colours.muted }[severity];
  pen.rect(x(steps[0]) - 1, height - 3, Math.max(3, x(steps[1]) - x(steps[0]) + 2), 3, colour);
}
