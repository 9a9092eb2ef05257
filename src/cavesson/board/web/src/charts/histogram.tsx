/** Draw several distributions over the same bins, in shares of their own totals: one filled, the others outlined. */

import { useCallback } from "preact/hooks";
import { Card } from "../parts/card";
import { useText } from "../i18n";
import { percent } from "../maths/format";
import { bottomAxis, type Frame, horizontal, leftAxis, type Position, vertical } from "./axes";
import { type Palette, usePalette } from "./palette";
import { type Pen, type Point, straight, svgOf } from "./pen";
import { Picture } from "./picture";

export interface Distribution {
  name: string;
  counts: number[];
  colour: string;
  filled?: boolean;
}

interface Props {
  title: string;
  hint?: string | undefined;
  edges: number[];
  distributions: Distribution[];
  /** whether it is known that there are no numbers */
  empty?: boolean;
  /** a line below the names */
  note?: string | null;
  /** a line at this value, such as zero in a distribution of differences */
  rule?: number | undefined;
  height?: number;
  onRange?: (low: number, high: number) => void;
}

export function HistogramChart(props: Props) {
  const { title, hint, distributions, height = 190, edges, empty, note, onRange } = props;
  const t = useText();
  const colours = usePalette();
  const draw = useCallback(
    (pen: Pen, width: number, tall: number): void => drawHistogram(pen, frameOf(width, tall), props, colours),
    [edges, distributions, props.rule, colours],
  );
  const drawFile = (pen: Pen): void => drawHistogram(pen, frameOf(640, 360, 36), props, colours);
  const pick = (x: number, _: number, width: number): void => {
    const frame = frameOf(width, height);
    const bin = Math.floor(((x - frame.left) / (frame.right - frame.left)) * (edges.length - 1));
    if (edges[bin] !== undefined && edges[bin + 1] !== undefined) onRange?.(edges[bin]!, edges[bin + 1]!);
  };
  return (
    <Card title={title} hint={hint} save={() => svgOf(640, 360, colours, drawFile, title)}>
      <div class="legend">
        {empty && t("noNumbers")}
        {distributions.map((one) => (
          <span key={one.name} class="key">
            <i style={{ background: one.colour }} />
            {one.name}
          </span>
        ))}
        {note && <span class="muted">{note}</span>}
      </div>
      <Picture draw={draw} height={height} label={title} onClick={onRange && pick} />
    </Card>
  );
}

function frameOf(width: number, height: number, top = 6): Frame {
  return { left: 40, top, right: width - 10, bottom: height - 20 };
}

function drawHistogram(pen: Pen, frame: Frame, { edges, distributions, rule }: Props, colours: Palette): void {
  if (edges.length < 2) return;
  const [low, high] = [edges[0]!, edges[edges.length - 1]!];
  const shares = distributions.map(({ counts }) => {
    const total = counts.reduce((sum, count) => sum + count, 0) || 1;
    return counts.map((count) => count / total);
  });
  const tallest = Math.max(0.01, ...shares.flat());
  const x = horizontal(frame, low, high);
  const y = vertical(frame, 0, tallest * 1.05);
  leftAxis(pen, frame, 0, tallest * 1.05, colours, (share) => percent(share, 0));
  bottomAxis(pen, frame, low, high, colours);
  distributions.forEach((one, i) => {
    if (one.filled) drawBars(pen, edges, shares[i]!, x, y, one.colour);
    else pen.line(outline(edges, shares[i]!, x, y), { colour: one.colour, width: 1.5 });
  });
  if (rule !== undefined && rule > low && rule < high)
    straight(pen, [x(rule), frame.top], [x(rule), frame.bottom], { colour: colours.ink, dash: [2, 3] });
}

function drawBars(pen: Pen, edges: number[], shares: number[], x: Position, y: Position, colour: string): void {
  shares.forEach((share, i) => {
    const left = x(edges[i]!);
    const width = Math.max(0.5, x(edges[i + 1]!) - left - 1);
    if (share > 0) pen.rect(left, y(share), width, y(0) - y(share), colour);
  });
}

function outline(edges: number[], shares: number[], x: Position, y: Position): Point[] {
  return [
    [x(edges[0]!), y(0)],
    ...shares.flatMap((share, i): Point[] => [
      [x(edges[i]!), y(share)],
      [x(edges[i + 1]!), y(share)],
    ]),
    [x(edges[edges.length - 1]!), y(0)],
  ];
}
