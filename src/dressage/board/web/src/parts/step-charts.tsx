/** Distributions of the selected step beside those of the first step and of the reference. */

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

function useHistogram(column: string | null, step: number, edges: Edges | null): Histogram | null {
  const run = useRun();
  const url =
    column === null || edges === null
      ? null
      : address(`runs/${run.run}/histogram`, { column, steps: `${step}-${step}`, ...edges });
  return useResource<Histogram>(url, useVersion(run.run)).data;
}

/** Edges that hold all of the distributions that are to be compared. */
function useEdges(columns: string[], steps: number[]): Edges | null {
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
  if (bounds.length === 0) return null;
  const [lo, hi] = [Math.min(...bounds), Math.max(...bounds)];
  const count = Math.max(...steps.map((step) => series!.rollups[columns[0]!]?.count[placeOf(series!.step, step)] ?? 0));
  return hi > lo ? { lo, hi, bins: bins(count) } : { lo: lo - 0.5, hi: hi + 0.5, bins: bins(count) };
}

export function RewardHistogram({ column }: { column: string }) {
  const t = useText();
  const colours = usePalette();
  const run = useRun();
  const step = useStep();
  const { query } = useRoute();
  const first = run.steps?.[0] ?? 0;
  const withReference = column === "reward" && run.columns.rows.includes("ref_reward");
  const edges = useEdges(withReference ? [column, "ref_reward"] : [column], [first, step]);
  const now = useHistogram(column, step, edges);
  const then = useHistogram(step === first ? null : column, first, edges);
  const reference = useHistogram(withReference ? "ref_reward" : null, step, edges);
  const distributions: Distribution[] = [];
  if (now)
    distributions.push({
      name: t("stepNumber", { step }),
      counts: now.counts,
      colour: `${colours.accent}99`,
      filled: true,
    });
  if (then && step !== first)
    distributions.push({ name: t("stepNumber", { step: first }), counts: then.counts, colour: colours.s2 });
  if (reference) distributions.push({ name: t("reference"), counts: reference.counts, colour: colours.reference });
  const name = column === "reward" ? t("reward") : column;
  const filtered = column.startsWith("part/") ? `parts["${column.slice(5)}"]` : column;
  const filter = (low: number, high: number): string =>
    `${filtered} >= ${round(low)} and ${filtered} <= ${round(high)}`;
  return (
    <HistogramChart
      title={t("distributionOf", { name })}
      hint={t("hintDistribution")}
      edges={now?.edges ?? []}
      distributions={distributions}
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
  const colours = usePalette();
  const step = useStep();
  const first = useRun().steps?.[0] ?? 0;
  const edges = useEdges(["gap"], [first, step]);
  const now = useHistogram("gap", step, edges);
  const then = useHistogram(step === first ? null : "gap", first, edges);
  const distributions: Distribution[] = [];
  if (now)
    distributions.push({
      name: t("stepNumber", { step }),
      counts: now.counts,
      colour: `${colours.accent}99`,
      filled: true,
    });
  if (then && step !== first)
    distributions.push({ name: t("stepNumber", { step: first }), counts: then.counts, colour: colours.s2 });
  return (
    <HistogramChart
      title={t("gapTitle")}
      hint={t("hintGap")}
      edges={now?.edges ?? []}
      distributions={distributions}
      rule={0}
    />
  );
}
