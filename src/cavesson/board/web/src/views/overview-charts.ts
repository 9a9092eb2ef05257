/** Which curves the overview shows, from what a run recorded. */

import type { Maybe, Rollup, Series } from "../api/types";
import type { Band, Curve, LineSpec } from "../charts/line-spec";
import { curveColour, type Palette } from "../charts/palette";
import type { Key, Translate } from "../i18n";
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
}

interface Wanted {
  title: Key;
  hint: Key;
  /** metrics of the step, or a statistic of the rollouts; what was not recorded is left out */
  curves: { name: string; from: string | Maybe[] | undefined; colour?: string; dashed?: boolean }[];
  spread?: Rollup | undefined;
  healthy?: [number, number];
}

/** KL of 0 to 10 nats per response is where training is usually healthy. */
const HEALTHY_KL: [number, number] = [0, 10];

export function mainCharts(series: Series, shaping: Shaping, colours: Palette, t: Translate): Chart[] {
  const of = (column: string): Rollup | undefined => series.rollups[column];
  const metric = (...names: string[]): Wanted["curves"] => names.map((from) => ({ name: short(from), from }));
  const sides = (name: string): Wanted["curves"] =>
    ["policy", "value"].map((side) => ({ name: side, from: `${side}/${name}` }));
  const parts = Object.keys(series.rollups).filter((name) => name.startsWith("part/"));
  const klMetric = series.metrics["kl/objective"];
  // Importers know the reference's responses to any prompt, training only those to held-out ones.
  const gap = of("gap") ?? of("eval/gap");
  const wanted: Wanted[] = [
    {
      title: "reward",
      hint: "hintReward",
      spread: of("reward"),
      curves: [
        { name: t("mean"), from: of("reward")?.mean },
        { name: t("evaluation"), from: of("eval/reward")?.mean, colour: colours.s3 },
        {
          name: t("reference"),
          from: (of("ref_reward") ?? of("eval/ref_reward"))?.mean,
          colour: colours.reference,
          dashed: true,
        },
      ],
    },
    {
      title: "kl",
      hint: "hintKl",
      spread: of("kl_k1"),
      healthy: HEALTHY_KL,
      curves: [
        { name: klMetric ? "objective" : "kl_k1", from: klMetric ?? of("kl_k1")?.mean },
        { name: t("evaluation"), from: "evaluation/kl", colour: colours.s3 },
      ],
    },
    {
      title: "entropy",
      hint: "hintEntropy",
      spread: of("entropy"),
      curves: [
        { name: t("sampled"), from: of("entropy")?.mean },
        { name: t("updated"), from: "policy/entropy", colour: colours.s3 },
      ],
    },
    {
      title: "length",
      hint: "hintLength",
      spread: of("length"),
      curves: [
        { name: t("mean"), from: of("length")?.mean },
        { name: t("evaluation"), from: of("eval/length")?.mean, colour: colours.s3 },
      ],
    },
    {
      title: "parts",
      hint: "hintParts",
      curves: parts.length > 1 ? parts.map((name) => ({ name: name.slice(5), from: of(name)!.mean })) : [],
    },
    ...episodeCharts(series, of, t, colours),
    { title: "gap", hint: "hintGap", spread: gap, curves: [{ name: t("mean"), from: gap?.mean }] },
    { title: "explained", hint: "hintExplained", curves: metric("value/explained_variance") },
    { title: "clip", hint: "hintClip", curves: sides("clip_fraction") },
    { title: "ratio", hint: "hintRatio", curves: metric("policy/ratio", "policy/ratio_max") },
    { title: "gradient", hint: "hintGradient", curves: metric("optim/grad_norm") },
    { title: "loss", hint: "hintLoss", curves: metric("loss/total", "loss/policy", "loss/value") },
    { title: "klCoefficient", hint: "hintKlCoefficient", curves: metric("kl/coef") },
    { title: "throughput", hint: "hintThroughput", curves: metric("tokens_per_second") },
  ];
  return wanted.flatMap((chart) => built(chart, series, shaping, colours, t));
}

const EPISODES = /^(?:episode|tool|finish)\//;

export const isOfEpisodes = (metric: string): boolean => EPISODES.test(metric);

/** Turns, tools and ends of episodes; none of a run without turns. */
function episodeCharts(
  series: Series,
  of: (column: string) => Rollup | undefined,
  t: Translate,
  colours: Palette,
): Wanted[] {
  const turns = of("turns");
  if (!turns && !series.metrics["episode/turns"]) return [];
  const metrics = Object.keys(series.metrics).filter(isOfEpisodes).sort();
  const named = (start: string, end: string): Wanted["curves"] =>
    metrics
      .filter((name) => name.startsWith(start) && name.endsWith(end))
      .map((from) => ({ name: from.slice(start.length, from.length - end.length), from }));
  const calls = named("tool/", "/calls");
  const counted = [
    { name: t("calls"), from: of("calls")?.mean },
    { name: t("failed"), from: of("call_errors")?.mean, colour: colours.bad },
  ];
  return [
    {
      title: "turns",
      hint: "hintTurns",
      spread: turns,
      curves: [
        { name: t("mean"), from: turns?.mean ?? "episode/turns" },
        { name: t("evaluation"), from: of("eval/turns")?.mean, colour: colours.s3 },
      ],
    },
    { title: "toolCalls", hint: "hintToolCalls", curves: calls.length > 0 ? calls : counted },
    { title: "toolErrors", hint: "hintToolErrors", curves: named("tool/", "/errors") },
    { title: "toolSeconds", hint: "hintToolSeconds", curves: named("tool/", "/seconds") },
    { title: "episodeEnds", hint: "hintEpisodeEnds", curves: named("finish/", "") },
  ];
}

/** The chart's title says the rest. */
const short = (metric: string): string => metric.slice(metric.indexOf("/") + 1);

/** Every other metric by the part of its name before the slash. */
export function otherCharts(series: Series, shaping: Shaping, colours: Palette, find: string): Map<string, Chart[]> {
  const groups = new Map<string, Chart[]>();
  for (const name of Object.keys(series.metrics).sort()) {
    if (!name.toLowerCase().includes(find.toLowerCase())) continue;
    const group = name.includes("/") ? name.slice(0, name.indexOf("/")) : "";
    const curves = [{ name, values: series.metrics[name]!, colour: colours.s1 }];
    const spec = shaped({ title: name, x: series.step, curves, bands: [], log: false }, shaping);
    groups.set(group, [...(groups.get(group) ?? []), { spec }]);
  }
  return groups;
}

function built(wanted: Wanted, series: Series, shaping: Shaping, colours: Palette, t: Translate): Chart[] {
  const { title, hint, curves, spread, healthy } = wanted;
  const found = curves.flatMap(({ name, from, colour, dashed = false }, i): Curve[] => {
    const values = typeof from === "string" ? series.metrics[from] : from;
    const measured = values?.some((value) => value !== null);
    return measured ? [{ name, values: values!, colour: colour ?? curveColour(colours, i), dashed }] : [];
  });
  if (found.length === 0) return [];
  const bands = spread && !shaping.zero ? bandsOf(spread, shaping.band, colours.s1) : [];
  const spec: LineSpec = { title: t(title), x: series.step, curves: found, bands, log: shaping.log, healthy };
  return [{ spec: shaped(spec, shaping), hint: t(hint) }];
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
