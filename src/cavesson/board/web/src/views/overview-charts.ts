/** Which curves the overview shows, from what a run recorded. */

import type { Maybe, Rollup, Series } from "../api/types";
import { type Band, type Curve, curveColour, type LineSpec } from "../charts/line-spec";
import type { Palette } from "../charts/palette";
import type { Key, Translate } from "../i18n";
import type { Along } from "../maths/along";
import { divided } from "../maths/moving";
import { fromZero, smooth } from "../maths/numbers";

export interface Shaping {
  smooth: number;
  zero: boolean;
  log: boolean;
  band: (typeof BANDS)[number];
}

/** What lies behind a mean: the middle 50 % and 90 % of the rollouts, one standard deviation each way, nothing. */
export const BANDS = ["quantiles", "spread", "none"] as const;

export interface Chart {
  spec: LineSpec;
  hint?: string | undefined;
  /** whether it keeps its place even if it never changes */
  isKept?: boolean;
}

interface Wanted {
  title: Key;
  hint: Key;
  isKept?: boolean;
  /** metrics of the step, or columns of the rollouts, whose mean it is; what was not recorded is left out */
  curves: { name: string; from: string | { column: string }; colour?: string; dashed?: boolean }[];
  spread?: Rollup | undefined;
  healthy?: [number, number];
}

/** What charts are made of. */
export interface Drawing {
  series: Series;
  shaping: Shaping;
  colours: Palette;
  t: Translate;
  /** where steps lie along the horizontal axis */
  along: Along;
  /** what is counted along it, if not steps */
  unit?: string | undefined;
}

/** KL of 0 to 10 nats per response is where training is usually healthy. */
const HEALTHY_KL: [number, number] = [0, 10];

/** The overview's charts of what a run recorded, in the order of what to look at first. */
export function mainCharts(drawing: Drawing): Chart[] {
  const wanted = [
    ...rewardCharts(drawing),
    ...signalCharts(drawing),
    ...policyCharts(drawing),
    ...episodeCharts(drawing),
    ...updateCharts(drawing),
  ];
  return wanted.flatMap((chart) => built(chart, drawing));
}

/**
 * Charts in their order, and apart from them those in which no curve changes. The reward stays where it is.
 *
 * @param of the same charts of the whole run, whatever is zoomed in on
 */
export function arranged(charts: readonly Chart[], of: readonly Chart[]): [shown: Chart[], unchanged: Chart[]] {
  const [, still] = divided(of, ({ spec }) => spec.curves.map((curve) => curve.measured ?? curve.values));
  const titles = new Set(still.filter(({ isKept }) => !isKept).map(({ spec }) => spec.title));
  const isStill = ({ spec }: Chart): boolean => titles.has(spec.title);
  return [charts.filter((chart) => !isStill(chart)), charts.filter(isStill)];
}

const rollupsOf =
  ({ series }: Drawing) =>
  (column: string): Rollup | undefined =>
    series.rollups[column];

const metric = (...names: string[]): Wanted["curves"] => names.map((from) => ({ name: short(from), from }));

/** A metric of training and of the held-out examples. */
const alsoHeldOut = ({ t, colours }: Drawing, ...names: string[]): Wanted["curves"] =>
  names.flatMap((from) => [
    { name: short(from), from },
    { name: `${short(from)}, ${t("evaluation")}`, from: `eval/${from}`, colour: colours.s3 },
  ]);

function rewardCharts(drawing: Drawing): Wanted[] {
  const { series, colours, t } = drawing;
  const of = rollupsOf(drawing);
  const parts = Object.keys(series.rollups).filter((name) => name.startsWith("part/"));
  // Importers know the reference's responses to any prompt, training only those to held-out ones.
  const gap = of("gap") ?? of("eval/gap");
  const reference = { column: of("ref_reward") ? "ref_reward" : "eval/ref_reward" };
  return [
    {
      title: "reward",
      hint: "hintReward",
      isKept: true,
      spread: of("reward"),
      curves: [
        { name: t("mean"), from: { column: "reward" } },
        { name: t("evaluation"), from: { column: "eval/reward" }, colour: colours.s3 },
        { name: t("reference"), from: reference, colour: colours.reference, dashed: true },
      ],
    },
    {
      title: "gap",
      hint: "hintGap",
      spread: gap,
      curves: [{ name: t("mean"), from: { column: of("gap") ? "gap" : "eval/gap" } }],
    },
    {
      title: "pairsRight",
      hint: "hintPairsRight",
      curves: alsoHeldOut(drawing, "reward/accuracy", "dpo/accuracy", "kto/accuracy"),
    },
    {
      title: "margin",
      hint: "hintMargin",
      curves: alsoHeldOut(drawing, "reward/margin", "dpo/reward_margin", "kto/reward_margin"),
    },
    {
      title: "parts",
      hint: "hintParts",
      curves: parts.length > 1 ? parts.map((name) => ({ name: name.slice(5), from: { column: name } })) : [],
    },
  ];
}

/** Whether there is anything to learn from. */
function signalCharts({ series, t }: Drawing): Wanted[] {
  const errors = named(series, "tool/", "/errors");
  const shareOf = (logged: string, counted: string): Wanted["curves"] => [
    { name: t("share"), from: series.metrics[logged] ? logged : counted },
  ];
  return [
    { title: "truncated", hint: "hintTruncated", curves: shareOf("finish/length", "rows/truncated") },
    { title: "zeroVariance", hint: "hintZeroVariance", curves: shareOf("group/zero_std", "rows/zero_variance") },
    { title: "toolErrors", hint: "hintToolErrors", curves: errors },
  ];
}

function policyCharts(drawing: Drawing): Wanted[] {
  const { series, colours, t } = drawing;
  const of = rollupsOf(drawing);
  const objective = series.metrics["kl/objective"];
  return [
    {
      title: "kl",
      hint: "hintKl",
      spread: of("kl_k1"),
      healthy: HEALTHY_KL,
      curves: [
        objective ? { name: "objective", from: "kl/objective" } : { name: "kl_k1", from: { column: "kl_k1" } },
        { name: t("evaluation"), from: "evaluation/kl", colour: colours.s3 },
      ],
    },
    { title: "teacherKl", hint: "hintTeacherKl", curves: metric("teacher/kl") },
    {
      title: "entropy",
      hint: "hintEntropy",
      spread: of("entropy"),
      curves: [
        { name: t("sampled"), from: { column: "entropy" } },
        { name: t("updated"), from: "policy/entropy", colour: colours.s3 },
      ],
    },
    {
      title: "length",
      hint: "hintLength",
      spread: of("length"),
      curves: [
        { name: t("mean"), from: { column: "length" } },
        { name: t("evaluation"), from: { column: "eval/length" }, colour: colours.s3 },
      ],
    },
  ];
}

function updateCharts(drawing: Drawing): Wanted[] {
  const sides = ["policy", "value"].map((side) => ({ name: side, from: `${side}/clip_fraction` }));
  return [
    { title: "loss", hint: "hintLoss", curves: losses(drawing) },
    { title: "explained", hint: "hintExplained", curves: metric("value/explained_variance") },
    { title: "gradient", hint: "hintGradient", curves: metric("optim/grad_norm") },
    { title: "clip", hint: "hintClip", curves: sides },
    { title: "ratio", hint: "hintRatio", curves: metric("policy/ratio", "policy/ratio_max") },
    { title: "klCoefficient", hint: "hintKlCoefficient", curves: metric("kl/coef") },
  ];
}

/** Of examples, the loss is judged on held-out ones; of rollouts, its parts are shown. */
function losses(drawing: Drawing): Wanted["curves"] {
  const { metrics } = drawing.series;
  if (metrics["loss/nll"]) return alsoHeldOut(drawing, "loss/nll");
  if (metrics["eval/loss/total"]) return alsoHeldOut(drawing, "loss/total");
  return metric("loss/total", "loss/policy", "loss/value");
}

/** Curves of the metrics between a start and an end of their names, which are left out of the legend. */
const named = (series: Series, start: string, end: string): Wanted["curves"] =>
  Object.keys(series.metrics)
    .filter((name) => name.startsWith(start) && name.endsWith(end))
    .sort()
    .map((from) => ({ name: from.slice(start.length, from.length - end.length), from }));

/** Turns, tools and ends of episodes; none of a run without turns. */
function episodeCharts(drawing: Drawing): Wanted[] {
  const { series, colours, t } = drawing;
  const of = rollupsOf(drawing);
  const turns = of("turns");
  if (!turns && !series.metrics["episode/turns"]) return [];
  const calls = named(series, "tool/", "/calls");
  const counted = [
    { name: t("calls"), from: { column: "calls" } },
    { name: t("failed"), from: { column: "call_errors" }, colour: colours.bad },
  ];
  return [
    {
      title: "turns",
      hint: "hintTurns",
      spread: turns,
      curves: [
        { name: t("mean"), from: turns ? { column: "turns" } : "episode/turns" },
        { name: t("evaluation"), from: { column: "eval/turns" }, colour: colours.s3 },
      ],
    },
    { title: "toolCalls", hint: "hintToolCalls", curves: calls.length > 0 ? calls : counted },
    { title: "toolSeconds", hint: "hintToolSeconds", curves: named(series, "tool/", "/seconds") },
    { title: "episodeEnds", hint: "hintEpisodeEnds", curves: named(series, "finish/", "") },
  ];
}

/** The chart's title says the rest. */
const short = (metric: string): string => metric.slice(metric.indexOf("/") + 1);

const TOTALS = ["time/total", "time/step"];

/** What the machine did: the GPUs, the processors, the memory, and where the time went. */
export function machineCharts(drawing: Drawing): Chart[] {
  const { series, t } = drawing;
  const gpus = (figure: string): Wanted["curves"] =>
    named(series, "machine/gpu/", `/${figure}`).map((curve) => ({ ...curve, name: `GPU ${curve.name}` }));
  const peaks = gpus("memory_peak").map(({ name, from }) => ({ name: t("peakOf", { name }), from, dashed: true }));
  const stages = named(series, "time/", "").filter(({ from }) => !TOTALS.includes(from as string));
  const host = (figure: string): Wanted["curves"] => [
    { name: t("thisMachine"), from: `machine/${figure}` },
    { name: t("process"), from: `machine/process/${figure}` },
  ];
  const wanted: Wanted[] = [
    { title: "throughput", hint: "hintThroughput", curves: metric("tokens_per_second") },
    { title: "stages", hint: "hintStages", curves: stages },
    { title: "gpuUtilization", hint: "hintGpuUtilization", curves: gpus("utilization") },
    { title: "gpuMemory", hint: "hintGpuMemory", curves: [...gpus("memory"), ...peaks] },
    { title: "gpuTemperature", hint: "hintGpuTemperature", curves: gpus("temperature") },
    { title: "gpuPower", hint: "hintGpuPower", curves: gpus("power") },
    { title: "cpu", hint: "hintCpu", curves: host("cpu") },
    { title: "memory", hint: "hintMemory", curves: host("memory") },
  ];
  return wanted.flatMap((chart) => built(chart, drawing));
}

/** Every metric by the part of its name before the slash. */
export function otherCharts(drawing: Drawing, find: string): Map<string, Chart[]> {
  const { series, colours } = drawing;
  const groups = new Map<string, Chart[]>();
  for (const name of Object.keys(series.metrics).sort()) {
    if (!name.toLowerCase().includes(find.toLowerCase())) continue;
    const group = name.includes("/") ? name.slice(0, name.indexOf("/")) : "";
    const curves = [{ name, key: name, values: series.metrics[name]!, colour: colours.s1 }];
    const spec = shaped({ ...placed(name, drawing), curves, bands: [] }, drawing.shaping);
    groups.set(group, [...(groups.get(group) ?? []), { spec }]);
  }
  return groups;
}

function placed(title: string, { series, shaping, along, unit }: Drawing): Omit<LineSpec, "curves" | "bands"> {
  const frame = { title, x: series.step, log: shaping.log };
  return unit === undefined ? frame : { ...frame, unit, x: series.step.map(along.at), steps: series.step };
}

function built(wanted: Wanted, drawing: Drawing): Chart[] {
  const { title, hint, isKept = false, curves, spread, healthy } = wanted;
  const { series, shaping, colours, t } = drawing;
  const found = curves.flatMap(({ name, from, colour, dashed = false }, i): Curve[] => {
    const isMetric = typeof from === "string";
    const values = isMetric ? series.metrics[from] : series.rollups[from.column]?.mean;
    if (!values?.some((value) => value !== null)) return [];
    return [{ name, key: isMetric ? from : from.column, values, colour: colour ?? curveColour(colours, i), dashed }];
  });
  if (found.length === 0) return [];
  const bands = spread && !shaping.zero ? bandsOf(spread, shaping.band, colours.s1) : [];
  const spec: LineSpec = { ...placed(t(title), drawing), curves: found, bands, healthy };
  return [{ spec: shaped(spec, shaping), hint: t(hint), isKept }];
}

function bandsOf({ mean, sd, ...rollup }: Rollup, kind: Shaping["band"], colour: string): Band[] {
  if (kind === "none") return [];
  if (kind === "quantiles")
    return [
      { low: rollup.q05, high: rollup.q95, colour: `${colour}14` },
      { low: rollup.q25, high: rollup.q75, colour: `${colour}26` },
    ];
  const away = (times: number): Maybe[] =>
    mean.map((value, i) => (value === null || sd[i] == null ? null : value + times * sd[i]!));
  return [{ low: away(-1), high: away(1), colour: `${colour}22` }];
}

/** Smoothed curves stand before their own pale originals. */
export function shaped(spec: LineSpec, { smooth: weight, zero, log }: Omit<Shaping, "band">): LineSpec {
  const curves = spec.curves.flatMap((curve): Curve[] => {
    const values = zero ? fromZero(curve.values) : curve.values;
    if (weight <= 0) return [{ ...curve, values }];
    const pale: Curve = {
      ...curve,
      name: `${curve.name} (raw)`,
      values,
      colour: `${curve.colour}55`,
      faint: true,
      dashed: false,
    };
    return [pale, { ...curve, values: smooth(values, weight), measured: values }];
  });
  return { ...spec, curves, log, healthy: zero ? undefined : spec.healthy };
}
