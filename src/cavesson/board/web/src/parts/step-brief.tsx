/** The selected step in short: its distribution of rewards, its best and its worst responses. */

import { address } from "../api/client";
import { useResource } from "../api/resource";
import type { Rows } from "../api/types";
import { useText } from "../i18n";
import { useRun, useVersion } from "../state/board";
import { useRoute } from "../state/router";
import { showing, splitOf } from "../state/selection";
import { Card } from "./card";
import { HeldOutSwitch } from "./held-out";
import { Link } from "./link";
import { RewardHistogram } from "./step-charts";
import { RolloutLine } from "./rollout-line";
import { Problem } from "./failure";

export function StepBrief({ step }: { step: number }) {
  const t = useText();
  const run = useRun();
  const split = splitOf(useRoute().query);
  const link = { run: run.run, step: String(step), ...showing(split) };
  return (
    <section>
      <div class="section">
        <h2>
          {t("step")} {step}
        </h2>
        <Link to={{ view: "step", query: link }}>{t("moreOfStep")}</Link>
        <Link to={{ view: "responses", query: { ...link, scope: "step", sort: "-reward" } }}>
          {t("responsesOfStep")}
        </Link>
        <HeldOutSwitch count={run.held_out} />
      </div>
      <div class="two">
        <RewardHistogram column="reward" />
        <BestWorst step={step} />
      </div>
    </section>
  );
}

export function BestWorst({ step }: { step: number }) {
  const t = useText();
  return (
    <Card title={t("bestWorst")}>
      <Extremes step={step} sort="-reward" />
      <hr />
      <Extremes step={step} sort="reward" />
    </Card>
  );
}

function Extremes({ step, sort }: { step: number; sort: string }) {
  const run = useRun();
  const split = splitOf(useRoute().query);
  const url = address(`runs/${run.run}/rows`, { split, sort, steps: `${step}-${step}`, offset: 0, limit: 4 });
  const { data, error } = useResource<Rows>(url, useVersion(run.run));
  if (error) return <Problem text={error} />;
  const rows = data?.rows ?? [];
  return (
    <div class="extremes">
      {(sort === "reward" ? [...rows].reverse() : rows).map((row) => (
        <RolloutLine key={row.sample} run={run.run} {...row} response={row.answer ?? row.response} />
      ))}
    </div>
  );
}
