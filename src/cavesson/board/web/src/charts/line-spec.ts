/** What a chart of curves over steps shows, and that chart as SVG. */

import { bottomAxis, type Frame, horizontal, leftAxis, vertical } from "./axes";
import type { Palette } from "./palette";
import { type Point, type SvgFile, SvgPen } from "./pen";
import { type Beyond, heightOf, type Range } from "../maths/height";
import { clamp, type Maybe } from "../maths/numbers";
import { number } from "../maths/format";

export interface Curve {
  name: string;
  /** of the metric or column that it shows, where notes can be written on it */
  key?: string;
  values: Maybe[];
  /** what was measured, where `values` are smoothed */
  measured?: Maybe[];
  colour: string;
  dashed?: boolean;
  /** drawn thin and pale behind its smoothed version, without its own number */
  faint?: boolean;
}

/** The colour of the n-th curve of several equals. */
export function curveColour(colours: Palette, index: number): string {
  return colours[`s${(index % 8) + 1}` as "s1"];
}

export interface Band {
  low: Maybe[];
  high: Maybe[];
  colour: string;
}

export interface LineSpec {
  title: string;
  /** the place of each point */
  x: number[];
  /** the step of each point, if its place is another number */
  steps?: number[];
  /** what the places count, if they are no steps */
  unit?: string;
  curves: Curve[];
  bands: Band[];
  log: boolean;
  /** where healthy values lie */
  healthy?: [low: number, high: number] | undefined;
}

/** Characters of #rrggbb, without the opacity. */
const OPAQUE = 7;
const WIDTH = 720;
const HEIGHT = 360;
const FRAME: Frame = { left: 64, top: 56, right: WIDTH - 20, bottom: HEIGHT - 36 };

/** What of a chart is drawn: from where to where along both axes, of a logarithmic axis as powers of ten. */
export interface Window {
  x: Range;
  y: Range;
  /** the values that the usual range leaves out; with the full range, they are drawn */
  beyond: Beyond | null;
}

/**
 * The part of a chart to draw.
 *
 * @param x from where to where; null is everything
 * @param full whether the vertical axis has room for outliers
 */
export function windowOf(spec: LineSpec, x: Range | null, full: boolean): Window {
  const [first, last] = x ?? [spec.x[0] ?? 0, spec.x.at(-1) ?? 1];
  const scaled = scaling(spec);
  const inside = (values: readonly Maybe[]): Maybe[] =>
    values.map((value, i) => (spec.x[i]! < first || spec.x[i]! > last ? null : scaled(value)));
  const height = heightOf(measuredOf(spec).map(([values]) => inside(values)));
  if (height === null) return { x: [first, last], y: [0, 1], beyond: null };
  const y = full || spec.log ? height.whole : height.usual;
  return { x: [first, last], y, beyond: spec.log ? null : height.beyond };
}

/** Of each value its height; a logarithmic axis has no place for zero and below. */
function scaling(spec: LineSpec): (value: Maybe) => Maybe {
  if (!spec.log) return (value) => value;
  return (value) => (value !== null && value > 0 ? Math.log10(value) : null);
}

/** What was measured, without smoothing: curves and the edges of bands, with their colours. */
function measuredOf(spec: LineSpec): [values: readonly Maybe[], colour: string][] {
  const curves = spec.curves.filter((curve) => !curve.faint);
  const edges = spec.bands.flatMap(({ low, high, colour }) => [low, high].map((values) => [values, colour] as const));
  return [
    ...curves.map(({ measured, values, colour }): [readonly Maybe[], string] => [measured ?? values, colour]),
    ...edges.map(([values, colour]): [readonly Maybe[], string] => [values, colour.slice(0, OPAQUE)]),
  ];
}

/** Where values leave the axis, at the upper end (1) or at the lower one (−1), and in which colour. */
export function* leaving(
  spec: LineSpec,
  { x, y, beyond }: Window,
): Generator<[place: number, end: 1 | -1, colour: string]> {
  for (const [values, colour] of beyond ? measuredOf(spec) : []) {
    for (const [i, value] of values.entries()) {
      const place = spec.x[i]!;
      if (value === null || place < x[0] || place > x[1] || (value >= y[0] && value <= y[1])) continue;
      yield [place, value > y[1] ? 1 : -1, colour];
    }
  }
}

/**
 * A chart as a picture.
 *
 * @param said what it says of values that it leaves out
 */
export function lineSvg(spec: LineSpec, window: Window, said: string, colours: Palette): SvgFile {
  const pen = new SvgPen(colours.sans);
  const [[first, last], [low, high]] = [window.x, window.y];
  const scaled = scaling(spec);
  const x = horizontal(FRAME, first, last);
  const y = vertical(FRAME, low, high);
  const label = spec.log ? (value: number): string => number(10 ** value) : number;

  pen.text(FRAME.left, 24, spec.title, { colour: colours.ink, size: 15, bold: true });
  leftAxis(pen, FRAME, low, high, colours, label);
  bottomAxis(pen, FRAME, first, last, colours);
  if (said) pen.text(FRAME.left, HEIGHT - 5, said, { colour: colours.muted, size: 11 });
  if (spec.unit) pen.text(FRAME.right, HEIGHT - 5, spec.unit, { colour: colours.muted, size: 11, align: "right" });
  const points = (values: readonly Maybe[]): Point[] =>
    values.flatMap((value, i): Point[] => {
      const height = scaled(value);
      const isShown = height !== null && Number.isFinite(height) && spec.x[i]! >= first && spec.x[i]! <= last;
      return isShown ? [[x(spec.x[i]!), y(clamp(height, low, high))]] : [];
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
  for (const [place, end, colour] of leaving(spec, window)) arrow(pen, x(place), end, colour);
  return [pen.svg(WIDTH, HEIGHT, colours.surface), WIDTH, HEIGHT];
}

/** A triangle at an end of the vertical axis, which points out of the picture. */
function arrow(pen: SvgPen, x: number, end: 1 | -1, colour: string): void {
  const y = end > 0 ? FRAME.top : FRAME.bottom;
  const size = 5;
  pen.area(
    [
      [x, y],
      [x - size, y + end * 1.6 * size],
      [x + size, y + end * 1.6 * size],
    ],
    colour,
  );
}
