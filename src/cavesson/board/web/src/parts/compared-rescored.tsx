/** Recorded rewards beside those that `cavesson rescore` computed: means, pairs whose order changes, and groups. */

import { useMemo } from "preact/hooks";
import { address } from "../api/client";
import { useResource } from "../api/resource";
import type { Difference, Rescored, RunSummary } from "../api/types";
import { LineChart } from "../charts/line-chart";
import { curveColour } from "../charts/line-spec";
import { usePalette } from "../charts/palette";
import { useText } from "../i18n";
import { number, percent, signed, whole } from "../maths/format";
import { gist } from "../maths/prompt";
import { oneLine, visible } from "../maths/text";
import { useVersion } from "../state/board";
import { patchRoute, useRoute } from "../state/router";
import { showing, splitOf } from "../state/selection";
import { parseZoom } from "../views/overview";
import { FactList } from "./facts";
import { Problem } from "./failure";
import { Link } from "./link";
import { Partial } from "./partial";
import { PromptLink } from "./prompt-link";
import { openTokens } from "./rollout-line";
import { SaveTable } from "./save-table";

/** @param props.runs those that are compared; a run without such rewards has nothing to show here */
export function ComparedRescored({ runs }: { runs: RunSummary[] }) {
  const t = useText();
  const { query } = useRoute();
  const choices = runs.flatMap((run) => (run.columns.rescored ?? []).map((name) => ({ run, name })));
  const asked = choices.find(({ run, name }) => `${run.run} ${name}` === query["rescored"]) ?? choices[0];
  if (!asked) return null;
  return (
    <section class="rescored">
      <div class="section">
        <h2>{t("rescoredTitle")}</h2>
        <select
          aria-label={t("rescoredName")}
          value={`${asked.run.run} ${asked.name}`}
          onChange={(event) => patchRoute({ rescored: event.currentTarget.value }, true)}
        >
          {choices.map(({ run, name }) => (
            <option key={`${run.run} ${name}`} value={`${run.run} ${name}`}>
              {runs.length > 1 ? `${run.name} · ${name}` : name}
            </option>
          ))}
        </select>
      </div>
      <OneName run={asked.run} name={asked.name} />
    </section>
  );
}

function OneName({ run, name }: { run: RunSummary; name: string }) {
  const split = splitOf(useRoute().query);
  const url = address(`runs/${run.run}/rescored`, { name, split });
  const { data, error } = useResource<Rescored>(url, useVersion(run.run));
  if (error) return <Problem text={error} />;
  if (!data) return null;
  return (
    <>
      <Partial of={data.partial} />
      <Summary name={name} data={data} />
      <Curves name={name} data={data} />
      <Groups run={run.run} name={name} data={data} />
    </>
  );
}

function Summary({ name, data }: { name: string; data: Rescored }) {
  const t = useText();
  const mean = (of: Difference, text: (value: number) => string): string => {
    if (of === null) return "–";
    const [middle, low, high] = of;
    return low === null || high === null ? text(middle) : `${text(middle)} [${text(low)}, ${text(high)}]`;
  };
  const plain = (value: number): string => number(value, 3);
  return (
    <div class="summary" title={t("rescoredHint")}>
      <FactList
        facts={[
          [t("rollouts"), `${whole(data.both)} / ${whole(data.rollouts)}`],
          [t("recordedReward"), mean(data.recorded, plain)],
          [name, mean(data.again, plain)],
          [t("paidMore"), mean(data.difference, signed)],
          [t("rankCorrelation"), number(data.correlation, 3)],
          [t("orderChanges"), mean(data.share, percent)],
        ]}
      />
      <p class="muted">
        {t("orderChangesOf", {
          flipped: whole(data.flipped),
          ordered: whole(data.ordered),
          ties: whole(data.pairs - data.ordered),
          groups: whole(data.flipped_groups),
          all: whole(data.all_groups),
        })}
      </p>
    </div>
  );
}

function Curves({ name, data }: { name: string; data: Rescored }) {
  const t = useText();
  const colours = usePalette();
  const zoom = parseZoom(useRoute().query["x"]);
  const specs = useMemo(() => {
    const x = data.steps.map(([first]) => first);
    const curve = (called: string, values: Rescored["curves"]["again"], index: number) => ({
      name: called,
      values,
      colour: curveColour(colours, index),
    });
    const { recorded, again, flipped } = data.curves;
    const rewards = [curve(t("recordedReward"), recorded, 0), curve(name, again, 1)];
    return [
      { title: t("meanReward"), x, curves: rewards, bands: [], log: false },
      { title: t("orderChanges"), x, curves: [curve(name, flipped, 1)], bands: [], log: false },
    ];
  }, [data, name, colours, t("meanReward")]);
  const last = data.steps.at(-1)?.[0] ?? 0;
  return (
    <div class="two">
      {specs.map((spec) => (
        <LineChart
          key={spec.title}
          spec={spec}
          step={last}
          zoom={zoom}
          onStep={() => undefined}
          onZoom={(range) => patchRoute({ x: range ? `${range[0]}-${range[1]}` : undefined }, true)}
        />
      ))}
    </div>
  );
}

function Groups({ run, name, data }: { run: string; name: string; data: Rescored }) {
  const t = useText();
  const split = splitOf(useRoute().query);
  if (data.groups.length === 0) return <p class="empty">{t("noOrderChanges")}</p>;
  return (
    <>
      <div class="section">
        <h3>{t("changedGroups")}</h3>
        <span class="muted">{whole(data.flipped_groups)}</span>
        <span class="space" />
        <SaveTable name={t("changedGroups")} rows={() => table(data, name)} />
      </div>
      {data.groups.map(({ step, prompt_id: id, prompt, responses }) => (
        <article key={`${step} ${responses[0].sample}`} class="group">
          <header>
            <PromptLink run={run} id={id} class="line">
              {oneLine(gist(prompt))}
            </PromptLink>
            <Link
              to={{
                view: "step",
                query: { run, step: String(step), read: String(responses[0].sample), ...showing(split) },
              }}
            >
              {t("stepNumber", { step })}
            </Link>
          </header>
          <div class="siblings">
            {responses.map(({ sample, recorded, again, response }) => (
              <button key={sample} type="button" onClick={() => openTokens(run, step, sample)}>
                <span>
                  <span class="muted">{t("recordedReward")}</span> <b>{number(recorded, 3)}</b>{" "}
                  <span class="muted">{name}</span> <b>{number(again, 3)}</b>
                </span>
                <span class="text">{visible(response)}</span>
              </button>
            ))}
          </div>
        </article>
      ))}
    </>
  );
}

function table({ groups }: Rescored, name: string): unknown[][] {
  const head = ["step", "prompt_id", "prompt"];
  const columns = ["sample", "recorded", "again", "response"] as const;
  return [
    [...head, ...[1, 2].flatMap((at) => columns.map((column) => `${at}: ${column === "again" ? name : column}`))],
    ...groups.map(({ step, prompt_id: id, prompt, responses }) => [
      ...[step, id, prompt],
      ...responses.flatMap((one) => columns.map((column) => one[column])),
    ]),
  ];
}
