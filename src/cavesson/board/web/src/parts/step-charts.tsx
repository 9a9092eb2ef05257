/** Distributions of the selected step beside those of the first step and of the reference. */

import { useMemo } from "preact/hooks";
import { address } from "../api/client";
import { useResource } from "../api/resource";
import type { Histogram } from "../api/types";
import { type Distribution, HistogramChart } from "../charts/histogram";
import { usePalette } from "../charts/palette";
import { useText } from "../i18n";
import { clamp } from "../maths/numbers";
import { placeOf } from "../maths/series";
import { go, useRoute } from "../state/router";
import { useRun, useStep, useVersion } from "../state/board";
import { useSeries } from "../state/series";

/** About two bins per square root of the rollouts, so that bars are neither combs nor blocks. */
const bins = (rollouts: number): number => Math.round(clamp(2 * Math.sqrt(rollouts), 10, 50));

interface Edges {
  lo: number;
  hi: number;
  bins: number;
}

function useHistogram(column: string | null, step: number, edges: Edges | null | undefined): Histogram | null {
  const run = useRun();
  const url =
    column === null || !edges
      ? null
      : address(`runs/${run.run}/histogram`, { column, steps: `${step}-${step}`, ...edges });
  return useResource<Histogram>(url, useVersion(run.run)).data;
}

/** Edges that hold all of the distributions that are to be compared; undefined if there are no numbers. */
function useEdges(columns: string[], steps: number[]): Edges | null | undefined {
  const series = useSeries(useRun().run, columns);
  const bounds = columns
    .flatMap((column) => {
      const rollup = series?.rollups[column];
      return rollup
        ? steps.flatMap((step) => {
            const at = placeOf(series!.step, step);
            return [rollup.min[at], rollup.max[at]];
          })
        : [];
    })
    .filter((bound): bound is number => typeof bound === "number");
  if (bounds.length === 0) return series?.rollups[columns[0]!] ? undefined : null;
  const [lo, hi] = [Math.min(...bounds), Math.max(...bounds)];
  const count = Math.max(...steps.map((step) => series!.rollups[columns[0]!]?.count[placeOf(series!.step, step)] ?? 0));
  return hi > lo ? { lo, hi, bins: bins(count) } : { lo: lo - 0.5, hi: hi + 0.5, bins: bins(count) };
}

interface Drawn {
  edges: number[];
  distributions: Distribution[];
  /** whether no numbers are recorded */
  empty: boolean;
}

/** The column at the step now, at the first step, and the reference's at the step now. */
function useDistributions(column: string, withReference: boolean): Drawn {
  const t = useText();
  const colours = usePalette();
  const step = useStep();
  const first = useRun().steps?.[0] ?? 0;
  const edges = useEdges(withReference ? [column, "ref_reward"] : [column], [first, step]);
  const now = useHistogram(column, step, edges);
  const then = useHistogram(step === first ? null : column, first, edges);
  const reference = useHistogram(withReference ? "ref_reward" : null, step, edges);
  const names = [t("stepNumber", { step }), t("stepNumber", { step: first }), t("reference")] as const;
  return useMemo(() => {
    const all: (Omit<Distribution, "counts"> & { of: Histogram | null })[] = [
      { of: now, name: names[0], colour: `${colours.accent}99`, filled: true },
      { of: then, name: names[1], colour: colours.s2 },
      { of: reference, name: names[2], colour: colours.reference },
    ];
    const distributions = all.flatMap(({ of, ...look }) => (of ? [{ ...look, counts: of.counts }] : []));
    return { edges: now?.edges ?? [], distributions, empty: edges === undefined };
  }, [now, then, reference, edges === undefined, colours, names.join()]);
}

export function RewardHistogram({ column }: { column: string }) {
  const t = useText();
  const run = useRun();
  const step = useStep();
  const { query } = useRoute();
  const drawn = useDistributions(column, column === "reward" && run.columns.rows.includes("ref_reward"));
  const name = column === "reward" ? t("reward") : column;
  const filtered = column.startsWith("part/") ? `parts["${column.slice(5)}"]` : column;
  const filter = (low: number, high: number): string =>
    `${filtered} >= ${round(low)} and ${filtered} <= ${round(high)}`;
  return (
    <HistogramChart
      title={t("distributionOf", { name })}
      hint={t("hintDistribution")}
      {...drawn}
      onRange={(low, high) =>
        go("responses", {
          run: String(run.run),
          step: String(step),
          scope: "step",
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
  return <HistogramChart title={t("gapTitle")} hint={t("hintGap")} {...useDistributions("gap", false)} rule={0} />;
}
