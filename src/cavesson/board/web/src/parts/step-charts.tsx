/** Distributions of the selected step beside those of the first step and of the reference. */

import { useMemo } from "preact/hooks";
import { address } from "../api/client";
import { useResource } from "../api/resource";
import type { Histogram, Series } from "../api/types";
import { type Distribution, HistogramChart } from "../charts/histogram";
import { usePalette } from "../charts/palette";
import { type Translate, useText } from "../i18n";
import { whole } from "../maths/format";
import { clamp } from "../maths/numbers";
import { pairs, placeOf } from "../maths/series";
import { go, useRoute } from "../state/router";
import { useRun, useStep, useVersion } from "../state/board";
import { showing, type Split, splitOf } from "../state/selection";
import { useSeries } from "../state/series";
import { shownSplit, titled } from "./held-out";

/** About two bins per square root of the rollouts, so that bars are neither combs nor blocks. */
const bins = (rollouts: number): number => Math.round(clamp(2 * Math.sqrt(rollouts), 10, 50));

interface Edges {
  lo: number;
  hi: number;
  bins: number;
}

/** What of a run a histogram is of. */
interface Part {
  /** null where there is none */
  column: string | null;
  steps: readonly [number, number];
  /** where its roll-up is among the curves */
  place: number;
  split: Split;
}

function useHistogram({ column, steps, split }: Part, edges: Edges | null | undefined): Histogram | null {
  const run = useRun();
  const url =
    column === null || !edges
      ? null
      : address(`runs/${run.run}/histogram`, { split, column, steps: steps.join("-"), ...edges });
  return useResource<Histogram>(url, useVersion(run.run)).data;
}

/** A column at a step; of held-out responses at the newest evaluation up to there. */
function partAt(series: Series | null, column: string, step: number, split: Split): Part {
  const counts = split && series?.rollups[`eval/${column}`]?.count;
  if (!series || !counts) {
    return { column, steps: [step, step], place: placeOf(series?.step ?? [], step), split };
  }
  const evaluated = counts.flatMap((count, place) => (count ? [place] : []));
  const place = evaluated.findLast((place) => series.step[place]! <= step) ?? evaluated[0] ?? 0;
  return { column, steps: pairs(series)[place] ?? [step, step], place, split };
}

/** Edges that hold all of the distributions that are to be compared; undefined if there are no numbers. */
function edgesOf(series: Series | null, parts: Part[]): Edges | null | undefined {
  const rollups = parts.flatMap(({ column, place, split }) => {
    const rollup = column === null ? undefined : series?.rollups[split ? `eval/${column}` : column];
    return rollup ? [{ rollup, place }] : [];
  });
  const bounds = rollups
    .flatMap(({ rollup, place }) => [rollup.min[place], rollup.max[place]])
    .filter((bound): bound is number => typeof bound === "number");
  if (bounds.length === 0) return rollups.length > 0 ? undefined : null;
  const [lo, hi] = [Math.min(...bounds), Math.max(...bounds)];
  const count = Math.max(...rollups.map(({ rollup, place }) => rollup.count[place] ?? 0));
  return hi > lo ? { lo, hi, bins: bins(count) } : { lo: lo - 0.5, hi: hi + 0.5, bins: bins(count) };
}

interface Drawn {
  /** the first is of the step that was asked for */
  split: Split;
  steps: readonly [number, number];
  edges: number[];
  distributions: Distribution[];
  /** whether no numbers are recorded */
  empty: boolean;
  /** how many responses of the step have no value, if any */
  note: string | null;
}

/** The column at the step now, at the first step, and the reference's at the step now. */
function useDistributions(column: string): Drawn {
  const t = useText();
  const colours = usePalette();
  const run = useRun();
  const step = useStep();
  const series = useSeries(run.run, [column, `eval/${column}`]);
  const split = shownSplit(series, column, splitOf(useRoute().query));
  const here = partAt(series, column, step, split);
  const start = partAt(series, column, run.steps?.[0] ?? 0, split);
  const before = start.steps[0] === here.steps[0] ? { ...start, column: null } : start;
  // The reference's rewards for other prompts than these would say nothing.
  const compared = column === "reward" && series?.rollups[split ? "eval/ref_reward" : "ref_reward"];
  const other = { ...here, column: compared ? "ref_reward" : null };
  const edges = edgesOf(series, [here, before, other]);
  const now = useHistogram(here, edges);
  const then = useHistogram(before, edges);
  const reference = useHistogram(other, edges);
  const [at, first] = [here.steps[0], start.steps[0]];
  const names = [t("stepNumber", { step: at }), t("stepNumber", { step: first }), t("reference")] as const;
  return useMemo(() => {
    const all: (Omit<Distribution, "counts"> & { of: Histogram | null })[] = [
      { of: now, name: names[0], colour: `${colours.accent}99`, filled: true },
      { of: then, name: names[1], colour: colours.s2 },
      { of: reference, name: names[2], colour: colours.reference },
    ];
    const distributions = all.flatMap(({ of, ...look }) => (of ? [{ ...look, counts: of.counts }] : []));
    const empty = edges === undefined;
    return { split, steps: here.steps, edges: now?.edges ?? [], distributions, empty, note: missingOf(now, t) };
  }, [now, then, reference, edges === undefined, colours, split, names.join()]);
}

/** The edges hold all values, so those that are not counted are missing. */
function missingOf(histogram: Histogram | null, t: Translate): string | null {
  if (!histogram || histogram.missing === 0) return null;
  const known = histogram.counts.reduce((sum, count) => sum + count, 0);
  return t("withoutValue", { count: whole(histogram.missing), total: whole(known + histogram.missing) });
}

export function RewardHistogram({ column }: { column: string }) {
  const t = useText();
  const run = useRun();
  const step = useStep();
  const { query } = useRoute();
  const { split, steps, ...drawn } = useDistributions(column);
  const name = column === "reward" ? t("reward") : column;
  const filtered = column.startsWith("part/") ? `parts["${column.slice(5)}"]` : column;
  const filter = (low: number, high: number): string =>
    `${filtered} >= ${round(low)} and ${filtered} <= ${round(high)}`;
  return (
    <HistogramChart
      title={titled(t("distributionOf", { name }), split, t)}
      hint={t("hintDistribution")}
      {...drawn}
      onRange={(low, high) =>
        go("responses", {
          run: run.run,
          step: String(split ? steps[0] : step),
          scope: "step",
          ...showing(split),
          filter: filter(low, high),
          sort: query["sort"] ?? "-reward",
        })
      }
    />
  );
}

const round = (value: number): number => Number(value.toPrecision(6));

export function GapHistogram() {
  const t = useText();
  const { split, steps: _, ...drawn } = useDistributions("gap");
  return <HistogramChart title={titled(t("gapTitle"), split, t)} hint={t("hintGap")} {...drawn} rule={0} />;
}
