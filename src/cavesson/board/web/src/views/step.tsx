/** One step: what it earned, how that changed over the run, its groups, and prompts that never beat the reference. */

import { address } from "../api/client";
import { useResource } from "../api/resource";
import type { Ridge, RunSummary, Series } from "../api/types";
import { RidgeChart } from "../charts/ridge";
import { useText } from "../i18n";
import { number, whole } from "../maths/format";
import { FactList } from "../parts/facts";
import { Groups } from "../parts/groups";
import { HeldOutSwitch, shownSplit, titled } from "../parts/held-out";
import { NeverBeats } from "../parts/never-beats";
import { Problem } from "../parts/failure";
import { BestWorst } from "../parts/step-brief";
import { GapHistogram, RewardHistogram } from "../parts/step-charts";
import { ToolTable } from "../parts/tool-table";
import { selectStep, useRun, useStep, useVersion } from "../state/board";
import { patchRoute, useRoute } from "../state/router";
import { splitOf } from "../state/selection";
import { useSeries } from "../state/series";

/** As tall as what stands beside it. */
const TALL = 452;

export function StepView() {
  const t = useText();
  const run = useRun();
  const step = useStep();
  const { query } = useRoute();
  const columns = drawable(run);
  const column = columns.find((name) => name === query["column"]) ?? "reward";
  // The curves of a long run have several steps to a point; this is of the one step.
  const series = useResource<Series>(
    address(`runs/${run.run}/series`, { names: `${column},eval/${column}`, steps: `${step}-${step}` }),
    useVersion(run.run),
  ).data;
  const whole = useSeries(run.run, [column, `eval/${column}`]);
  const split = shownSplit(whole, column, splitOf(query));
  const ridge = useResource<Ridge>(
    whole && address(`runs/${run.run}/ridge`, { split, column, bins: 60, buckets: 24 }),
    useVersion(run.run),
  );
  const missing = series !== null && series.step.length === 0;
  const hasReference = run.columns.rows.includes("ref_reward");
  return (
    <main class="view">
      <div class="bar">
        <h2>
          {t("step")} {step}
        </h2>
        {series && <StepFacts series={series} column={split ? `eval/${column}` : column} step={step} />}
        <span class="space" />
        <HeldOutSwitch count={run.held_out} />
        <label>
          {t("column")}
          <select value={column} onChange={(event) => patchRoute({ column: event.currentTarget.value }, true)}>
            {columns.map((name) => (
              <option key={name} value={name}>
                {name}
              </option>
            ))}
          </select>
        </label>
      </div>
      {splitOf(query) && series && !series.rollups[`eval/${column}`] && (
        <p class="muted">{t("notEvaluated", { step })}</p>
      )}
      {missing && <p class="empty">{t("emptyStep", { step })}</p>}
      <div class="two step">
        <div class="stack">
          <RewardHistogram column={column} />
          {hasReference ? <GapHistogram /> : <BestWorst step={step} />}
        </div>
        {ridge.data && (
          <RidgeChart
            title={titled(t("overRun", { name: column === "reward" ? t("reward") : column }), split, t)}
            hint={t("hintRidge")}
            ridge={ridge.data}
            height={TALL}
            step={step}
            heat={query["ridge"] === "heat"}
            onHeat={(heat) => patchRoute({ ridge: heat ? "heat" : undefined }, true)}
            onStep={selectStep}
          />
        )}
        <Problem text={ridge.error} />
      </div>
      <ToolTable step={step} />
      <Groups step={step} />
      {hasReference ? <NeverBeats /> : <p class="empty">{t("noReference")}</p>}
    </main>
  );
}

const NOT_DRAWN = new Set(["step", "sample", "group", "attempt", "rank", "policy_version"]);

function drawable(run: RunSummary): string[] {
  const parts = run.columns.parts.map((name) => `part/${name}`);
  return [...new Set([...run.columns.rows, ...parts])].filter((name) => !NOT_DRAWN.has(name));
}

function StepFacts({ series, column, step }: { series: Series; column: string; step: number }) {
  const t = useText();
  const at = series.step.indexOf(step);
  const rollup = series.rollups[column];
  if (!rollup || at < 0) return null;
  return (
    <FactList
      facts={[
        [t("rollouts"), whole(rollup.count[at])],
        [t("mean"), number(rollup.mean[at])],
        [t("spread"), number(rollup.sd[at], 3)],
        [t("median"), number(rollup.q50[at])],
        [t("lowest"), number(rollup.min[at])],
        [t("highest"), number(rollup.max[at])],
      ]}
    />
  );
}
