/** Curves over steps: zoom by dragging, one crosshair for all charts, a click selects the step. */

import uPlot from "uplot";
import { useLayoutEffect, useMemo, useRef } from "preact/hooks";
import type { ComponentChildren } from "preact";
import { Card } from "../parts/card";
import { type Translate, useText } from "../i18n";
import type { Along } from "../maths/along";
import { number } from "../maths/format";
import type { Beyond } from "../maths/height";
import { placeOf } from "../maths/series";
import { Switch } from "../parts/segments";
import { useRoute } from "../state/router";
import { leaving, type LineSpec, lineSvg, type Window, windowOf } from "./line-spec";
import { type Palette, usePalette } from "./palette";
import { forgetWidth, withWidth } from "./widths";

export interface Mark {
  step: number;
  colour: string;
  title: string;
}

/** What somebody wrote on a step, or on a curve there. */
export interface Flag {
  step: number;
  colour: string;
  text: string;
}

/** Steps that are shaded behind the curves. */
export interface Stretch {
  steps: readonly [first: number, last: number];
  colour: string;
}

interface Props {
  spec: LineSpec;
  hint?: string | undefined;
  height?: number;
  step: number;
  /** steps, whatever the curves are drawn along */
  zoom: [number, number] | null;
  /** where steps lie, if not at their own number */
  along?: Along;
  marks?: Mark[];
  flags?: Flag[];
  stretches?: Stretch[];
  onStep: (step: number) => void;
  onZoom: (zoom: [number, number] | null) => void;
  actions?: ComponentChildren;
  children?: ComponentChildren;
}

/** The properties, and what of the chart is drawn. */
interface Drawn extends Props {
  window: Window;
}

const BY_STEP: Along = { at: (step) => step, stepAt: (place) => place };

/** Pixels of a digit on the axes. */
const DIGIT = 6.4;

export function LineChart(props: Props) {
  const { spec, hint, height = 150, step, zoom, along = BY_STEP } = props;
  const t = useText();
  const full = useRoute().query["full"] === "1";
  const colours = usePalette();
  const window = useMemo(
    () => windowOf(spec, zoom && [along.at(zoom[0]), along.at(zoom[1])], full),
    [spec, zoom?.[0], zoom?.[1], along, full],
  );
  const said = window.beyond ? beyondText(window.beyond, t) : "";
  const place = useRef<HTMLDivElement>(null);
  const legend = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef<Drawn>({ ...props, window });
  latest.current = { ...props, window };

  const shape = useMemo(() => shapeOf(spec), [spec]);
  useLayoutEffect(() => {
    const box = place.current!;
    const make = (width: number): void => {
      plot.current = new uPlot(options(latest, legend, colours, width, height), columns(latest.current.spec), box);
      show(plot.current, latest.current, legend.current!);
    };
    withWidth(box, make);
    const watcher = new ResizeObserver(() => {
      const width = box.clientWidth;
      if (!plot.current) withWidth(box, make);
      else if (plot.current.width !== width) plot.current.setSize({ width, height });
    });
    watcher.observe(box);
    return () => {
      forgetWidth(box);
      watcher.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape, colours, height]);

  useLayoutEffect(() => {
    plot.current?.setData(columns(spec), false);
    if (plot.current) show(plot.current, latest.current, legend.current!);
    else showValues(null, latest.current, legend.current!);
  }, [spec, window]);
  useLayoutEffect(() => plot.current?.redraw(false), [props.marks, JSON.stringify(props.flags), props.stretches]);
  useLayoutEffect(() => {
    if (plot.current) placeNeedle(plot.current, latest.current);
    showValues(plot.current, latest.current, legend.current!);
  }, [step]);

  return (
    <Card
      title={spec.title}
      level={2}
      hint={hint}
      actions={props.actions}
      save={() => lineSvg(spec, window, full ? "" : said, colours)}
    >
      <div class="legend" ref={legend}>
        {spec.curves
          .filter((curve) => !curve.faint)
          .map((curve) => (
            <span key={curve.name} class="key" title={curve.name}>
              <i style={{ background: curve.colour }} />
              <span class="name">{curve.name}</span>
              <b />
            </span>
          ))}
      </div>
      <div class="plot" ref={place} style={{ height: `${height}px` }} />
      {said && (
        <p class="beyond">
          {said} <Switch name="full" label={t("fullRange")} title={t("fullRangeHint")} />
        </p>
      )}
      {props.children}
    </Card>
  );
}

function beyondText({ count, lowest, highest }: Beyond, t: Translate): string {
  const values = { count, lowest: number(lowest), highest: number(highest) };
  return t(lowest === null ? "beyondAbove" : highest === null ? "beyondBelow" : "beyondBoth", values);
}

/** What of a chart cannot be changed once it is made. */
function shapeOf(spec: LineSpec): string {
  const curves = spec.curves.map(({ name, colour, dashed, faint }) => [name, colour, dashed, faint]);
  return JSON.stringify([curves, spec.bands.length, spec.log, spec.unit]);
}

function columns(spec: LineSpec): uPlot.AlignedData {
  const bands = spec.bands.flatMap((band) => [band.high, band.low]);
  // A logarithmic axis has no place for zero and below.
  const shown = [...bands, ...spec.curves.map((curve) => curve.values)].map((values) =>
    spec.log ? values.map((value) => (value !== null && value > 0 ? value : null)) : values,
  );
  return [spec.x, ...shown];
}

/** The whole run, or what is zoomed in on. */
function show(chart: uPlot, drawn: Drawn, legend: HTMLElement): void {
  const [first, last] = drawn.window.x;
  chart.setScale("x", { min: first, max: last > first ? last : first + 1 });
  showValues(chart, drawn, legend);
}

/** Writes each curve's value at the crosshair, else at the selected step, into the legend. */
function showValues(chart: uPlot | null, { spec, step }: Props, legend: HTMLElement): void {
  const index = chart?.cursor.idx ?? placeOf(spec.steps ?? spec.x, step);
  const values = spec.curves
    .filter((curve) => !curve.faint)
    .map((curve) => number((curve.measured ?? curve.values)[index]));
  legend.querySelectorAll("b").forEach((place, i) => (place.textContent = values[i] ?? ""));
}

type Latest = { current: Drawn };

function options(
  latest: Latest,
  legend: { current: HTMLDivElement | null },
  colours: Palette,
  width: number,
  height: number,
): uPlot.Options {
  const { spec } = latest.current;
  const axis: uPlot.Axis = {
    stroke: colours.muted,
    font: `11px ${colours.sans}`,
    grid: { stroke: colours.line, width: 1 },
    ticks: { show: false },
    gap: 4,
  };
  return {
    width,
    height,
    padding: [6, 10, 0, 0],
    legend: { show: false },
    scales: {
      x: { time: false, auto: false },
      y: { distr: spec.log ? 3 : 1, range: spec.log ? null : () => latest.current.window.y },
    } as uPlot.Scales,
    axes: [
      {
        ...axis,
        size: 22,
        space: spec.unit ? 80 : 60,
        values: (_, values) =>
          values.map((value) => (spec.unit ? number(value) : Number.isInteger(value) ? String(value) : "")),
      },
      {
        ...axis,
        size: (_, values) => axisWidth(values),
        space: 28,
        values: (_, values) => values.map((value) => (value === null ? "" : number(value))),
      },
    ],
    series: [{}, ...seriesOf(spec)],
    bands: spec.bands.map((band, i) => ({ series: [2 * i + 1, 2 * i + 2] as [number, number], fill: band.colour })),
    cursor: {
      sync: { key: "steps", setSeries: false },
      drag: { x: true, y: false, setScale: false },
      points: { size: 5, width: 0 },
      y: false,
    },
    hooks: {
      ready: [(chart) => listen(chart, latest), addNeedle],
      setCursor: [(chart) => legend.current && showValues(chart, latest.current, legend.current)],
      setSelect: [(chart) => zoomTo(chart, latest)],
      drawClear: [(chart) => drawBehind(chart, latest.current, colours)],
      draw: [
        (chart) => drawMarks(chart, latest.current, colours),
        (chart) => placeNeedle(chart, latest.current),
        (chart) => placeFlags(chart, latest.current),
      ],
    },
  };
}

/** As wide as the longest number, so that no digit and no sign is cut off. */
function axisWidth(values: string[] | null): number {
  return Math.max(46, 8 + DIGIT * Math.max(0, ...(values ?? []).map((text) => text.length)));
}

function seriesOf(spec: LineSpec): uPlot.Series[] {
  const edge: uPlot.Series = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
  return [
    ...spec.bands.flatMap(() => [edge, edge]),
    ...spec.curves.map((curve): uPlot.Series => {
      const few = curve.values.reduce<number>((count, value) => count + (value === null ? 0 : 1), 0) < 2;
      return {
        stroke: curve.colour,
        width: curve.faint ? 1 : 1.6,
        dash: curve.dashed ? [5, 4] : [],
        points: { show: few, size: 5, fill: curve.colour, stroke: curve.colour },
        spanGaps: true,
      };
    }),
  ];
}

function listen(chart: uPlot, latest: Latest): void {
  chart.over.addEventListener("click", () => {
    if (chart.select.width > 3 || chart.cursor.idx == null) return;
    const { spec } = latest.current;
    const step = (spec.steps ?? spec.x)[chart.cursor.idx];
    if (step !== undefined) latest.current.onStep(step);
  });
  chart.over.addEventListener("dblclick", () => latest.current.onZoom(null));
}

function zoomTo(chart: uPlot, latest: Latest): void {
  const { left, width } = chart.select;
  if (width <= 3) return;
  const { along = BY_STEP } = latest.current;
  const [first, last] = [left, left + width].map((pixel) => along.stepAt(chart.posToVal(pixel, "x"))) as [
    number,
    number,
  ];
  // The click that ends the drag still has to see the selection; it goes after it.
  setTimeout(() => {
    chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    latest.current.onZoom([Math.floor(first), Math.ceil(last)]);
  });
}

/** The selected step is an element behind the curves: choosing another one draws no curve anew. */
function addNeedle(chart: uPlot): void {
  chart.under.append(Object.assign(document.createElement("i"), { className: "needle" }));
}

function placeNeedle(chart: uPlot, { step, along = BY_STEP }: Props): void {
  const needle = chart.under.querySelector<HTMLElement>(".needle");
  if (needle) needle.style.transform = `translateX(${Math.round(chart.valToPos(along.at(step), "x"))}px)`;
}

/** Notes are elements, so that the pointer on one shows its text; a click goes to the chart and chooses the step. */
function placeFlags(chart: uPlot, { flags = [], along = BY_STEP }: Props): void {
  chart.over.querySelectorAll(".flag").forEach((flag) => flag.remove());
  for (const { step, colour, text } of flags) {
    const x = chart.valToPos(along.at(step), "x");
    if (x < 0 || x > chart.over.clientWidth) continue;
    const flag = Object.assign(document.createElement("i"), { className: "flag", title: text });
    flag.style.left = `${Math.round(x)}px`;
    flag.style.color = colour;
    chart.over.append(flag);
  }
}

/** The healthy range lies behind the curves. */
function drawBehind(chart: uPlot, { spec, stretches = [] }: Props, colours: Palette): void {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  if (spec.healthy) {
    const [low, high] = spec.healthy.map((value) => chart.valToPos(value, "y", true)) as [number, number];
    ctx.fillStyle = `${colours.good}14`;
    ctx.fillRect(bbox.left, high, bbox.width, low - high);
  }
  for (const { steps, colour } of stretches) {
    const [first, last] = steps.map((value) => chart.valToPos(value, "x", true)) as [number, number];
    ctx.fillStyle = `${colour}1f`;
    ctx.fillRect(first, bbox.top, Math.max(2 * devicePixelRatio, last - first), bbox.height);
  }
  ctx.restore();
}

/** Findings stand on the lower axis; an arrow shows where a curve leaves the chart. */
function drawMarks(chart: uPlot, { spec, window, marks = [], along = BY_STEP }: Drawn, colours: Palette): void {
  const { left, top, width, height } = chart.bbox;
  const bottom = top + height;
  const size = 7 * devicePixelRatio;
  for (const mark of marks) {
    const x = chart.valToPos(along.at(mark.step), "x", true);
    if (x >= left && x <= left + width) triangle(chart, x, bottom - size, bottom, mark.colour || colours.bad);
  }
  for (const [place, end, colour] of leaving(spec, window)) {
    const tip = end > 0 ? top : bottom;
    triangle(chart, chart.valToPos(place, "x", true), tip, tip + end * size, colour);
  }
}

function triangle({ ctx }: uPlot, x: number, tip: number, base: number, colour: string): void {
  const half = Math.abs(base - tip) * 0.57;
  ctx.fillStyle = colour;
  ctx.beginPath();
  ctx.moveTo(x, tip);
  ctx.lineTo(x - half, base);
  ctx.lineTo(x + half, base);
  ctx.fill();
}
