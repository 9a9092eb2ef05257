/** One prompt: its text and right answer, its rewards over the run, all that was answered, and two answers compared. */

import { useMemo } from "preact/hooks";
import { address } from "../api/client";
import { useResource } from "../api/resource";
import type { PromptPage as Page } from "../api/types";
import { usePalette } from "../charts/palette";
import { LineChart } from "../charts/line-chart";
import type { LineSpec } from "../charts/line-spec";
import { useText } from "../i18n";
import { number, whole } from "../maths/format";
import { selectStep, useRun, useStep, useVersion } from "../state/board";
import { useRoute } from "../state/router";
import { showing, splitOf } from "../state/selection";
import { Card } from "./card";
import { FactList } from "./facts";
import { Problem } from "./failure";
import { HeldOutSwitch, titled } from "./held-out";
import { Link } from "./link";
import { LeftOut, Partial } from "./partial";
import { PromptText } from "./prompt";
import { changeOf, solvedOf } from "./prompt-list";
import { PromptResponses } from "./prompt-responses";
import { Text } from "./text";
import { TwoResponses } from "./two-responses";

export function PromptPage({ id }: { id: string }) {
  const t = useText();
  const run = useRun();
  const { query } = useRoute();
  const split = splitOf(query);
  const url = address(`runs/${run.run}/prompts/${encodeURIComponent(id)}`, { split, solved: query["solved"] });
  const { data, error } = useResource<Page>(url, useVersion(run.run));
  const all = { run: run.run, ...showing(split) };
  const responses = { ...all, filter: filterOf(id), sort: "-reward" };
  return (
    <main class="view prompt-page">
      <div class="bar">
        <h2>
          {t("prompt")} <code>{id}</code>
        </h2>
        <Link to={{ view: "prompt", query: all }}>{t("allPrompts")}</Link>
        <Link to={{ view: "responses", query: responses }}>{t("itsResponses")}</Link>
        <span class="space" />
        <HeldOutSwitch count={run.held_out} />
      </div>
      <Problem text={error} />
      <Partial of={data?.partial} />
      {data && <Body key={data.prompt_id} run={run.run} prompt={data} />}
    </main>
  );
}

/** How a filter names a prompt. */
export const filterOf = (id: string): string => `prompt_id == "${id}"`;

function Body({ run, prompt }: { run: string; prompt: Page }) {
  const t = useText();
  const split = splitOf(useRoute().query);
  return (
    <>
      {prompt.n > 0 && <PromptFacts prompt={prompt} />}
      <div class="two">
        <Card title={t("prompt")}>
          <PromptText text={prompt.prompt} whole={prompt.prompt_truncated} />
          {prompt.ground_truth !== null && (
            <>
              <h3>{t("groundTruth")}</h3>
              <Text text={prompt.ground_truth} search="" whole={prompt.ground_truth_truncated} />
            </>
          )}
        </Card>
        {prompt.steps.step.length > 0 && <RewardChart prompt={prompt} />}
      </div>
      <LeftOut count={prompt.left_out} split={split} />
      {prompt.n > 0 && (
        <>
          <TwoResponses run={run} prompt={prompt} />
          <PromptResponses run={run} prompt={prompt} />
        </>
      )}
    </>
  );
}

function PromptFacts({ prompt }: { prompt: Page }) {
  const t = useText();
  const { n, unscored, mean, solved, solved_from: least, harder, easier } = prompt;
  const facts: [string, string][] = [
    [t("rollouts"), whole(n)],
    [t("meanReward"), number(mean)],
    [t("firstToLast"), changeOf(prompt)],
  ];
  if (unscored > 0) facts.push(["", t("unscored", { count: whole(unscored), total: whole(n) })]);
  if (solved !== null) facts.push([t("solvedAt", { least: number(least) }), solvedOf(prompt)]);
  if (mean !== null) facts.push([t("place"), t("placeAmong", { easier: whole(easier), harder: whole(harder) })]);
  return <FactList facts={facts} />;
}

function RewardChart({ prompt: { steps } }: { prompt: Page }) {
  const t = useText();
  const colours = usePalette();
  const step = useStep();
  const split = splitOf(useRoute().query);
  const spec = useMemo((): LineSpec => {
    const away = (times: number) =>
      steps.mean.map((mean, i) => (mean === null || steps.sd[i] == null ? null : mean + times * steps.sd[i]!));
    return {
      title: titled(t("reward"), split, t),
      x: steps.step,
      curves: [{ name: t("mean"), values: steps.mean, colour: colours.s1 }],
      bands: [
        { low: steps.min, high: steps.max, colour: `${colours.s1}14` },
        { low: away(-1), high: away(1), colour: `${colours.s1}26` },
      ],
      log: false,
    };
  }, [steps, colours, t, split]);
  return (
    <LineChart spec={spec} hint={t("hintPromptReward")} step={step} zoom={null} onStep={selectStep} onZoom={() => {}} />
  );
}
