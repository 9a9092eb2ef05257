/** What a chart of curves over steps shows, and that chart as SVG. */

import { bottomAxis, type Frame, horizontal, leftAxis, vertical } from "./axes";
import type { Palette } from "./palette";
import { type Point, type SvgFile, SvgPen } from "./pen";
import { finite, type Maybe } from "../maths/numbers";
import { number } from "../maths/format";

export interface Curve {
  name: string;
  values: Maybe[];
  /** what was measured, where `values` are smoothed */
  measured?: Maybe[];
  colour: string;
  dashed?: boolean;
  /** drawn thin and pale behind its smoothed version, without its own number */
  faint?: boolean;
}

export interface Band {
  low: Maybe[];
  high: Maybe[];
  colour: string;
}

export interface LineSpec {
  title: string;
  x: number[];
  curves: Curve[];
  bands: Band[];
  log: boolean;
  /** whether the places are no steps, and so may be fractions */
  continuous?: boolean;
  /** where healthy values lie */
  healthy?: [low: number, high: number] | undefined;
}

const WIDTH = 720;
const HEIGHT = 360;
const FRAME: Frame = { left: 64, top: 56, right: WIDTH - 20, bottom: HEIGHT - 36 };

export function lineSvg(spec: LineSpec, zoom: [number, number] | null, colours: Palette): SvgFile {
  const pen = new SvgPen(colours.sans);
  const [first, last] = zoom ?? [spec.x[0] ?? 0, spec.x[spec.x.length - 1] ?? 1];
  const scaled = spec.log ? Math.log10 : (value: number): number => value;
  const [low, high] = extent(spec, first, last, scaled);
  const x = horizontal(FRAME, first, last);
  const y = vertical(FRAME, low, high);
  const label = spec.log ? (value: number): string => number(10 ** value) : number;

  pen.text(FRAME.left, 24, spec.title, { colour: colours.ink, size: 15, bold: true });
  leftAxis(pen, FRAME, low, high, colours, label);
  bottomAxis(pen, FRAME, first, last, colours);
  const points = (values: readonly Maybe[]): Point[] =>
    values.flatMap((value, i): Point[] => {
      const step = spec.x[i]!;
      const height = value === null ? NaN : scaled(value);
      return Number.isFinite(height) && step >= first && step <= last ? [[x(step), y(height)]] : [];
    });
  for (const band of spec.bands) pen.area([...points(band.high), ...points(band.low).reverse()], band.colour);
  let legend = FRAME.left;
  for (const curve of spec.curves) {
    const width = curve.faint ? 1 : 1.8;
    pen.line(points(curve.values), { colour: curve.colour, width, dash: curve.dashed ? [5, 4] : [] });
    if (curve.faint) continue;
    pen.rect(legend, 37, 14, 3, curve.colour);
    pen.text(legend + 19, 42, curve.name, { colour: colours.muted, size: 12 });
    legend += 40 + curve.name.length * 6.6;
  }
  return [pen.svg(WIDTH, HEIGHT, colours.surface), WIDTH, HEIGHT];
}

function extent(spec: LineSpec, first: number, last: number, scaled: (v: number) => number): [number, number] {
  const inside = (values: readonly Maybe[]): Maybe[] =>
    values.filter((_, i) => spec.x[i]! >= first && spec.x[i]! <= last);
  const all = [...spec.curves.map((curve) => curve.values), ...spec.bands.flatMap((band) => [band.low, band.high])];
  const values = finite(all.flatMap(inside).map((value) => (value === null ? null : scaled(value))));
  if (values.length === 0) return [0, 1];
  const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  const room = (high! - low!) * 0.05 || Math.abs(high!) * 0.1 || 1;
  return [low! - room, high! + room];
}
