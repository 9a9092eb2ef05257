/** Prompts by what their responses earn: a table of all, and short lists of those at the ends. */

import { useRef } from "preact/hooks";
import { address } from "../api/client";
import { useResource } from "../api/resource";
import type { PromptLine, Prompts } from "../api/types";
import { type Key, useText } from "../i18n";
import { number, signed, whole } from "../maths/format";
import { gist } from "../maths/prompt";
import { oneLine } from "../maths/text";
import { useRun, useVersion } from "../state/board";
import { useKeys } from "../state/keys";
import { patchRoute, useRoute } from "../state/router";
import { showing, type Split, splitOf } from "../state/selection";
import { useAfterPaint } from "../tokens/after-paint";
import { Card } from "./card";
import { Problem } from "./failure";
import { Field } from "./field";
import { HeldOutSwitch } from "./held-out";
import { Link } from "./link";
import { Pages } from "./pages";
import { LeftOut, Partial } from "./partial";
import { PromptLink } from "./prompt-link";
import { SaveTable } from "./save-table";
import { Segments } from "./segments";

export const ORDERS = ["hardest", "improved", "never", "always", "easiest", "declined"] as const;
export type Order = (typeof ORDERS)[number];

const NAMES: Record<Order, Key> = {
  hardest: "hardest",
  improved: "mostImproved",
  never: "neverSolved",
  always: "alwaysSolved",
  easiest: "easiest",
  declined: "mostDeclined",
};

/** Where the search looks: in the prompts, and on demand elsewhere. */
const WITHIN = ["prompt", "ground_truth", "reasons"] as const;

const PAGE = 30;
const SHORT = 5;

export function PromptList() {
  const t = useText();
  const run = useRun();
  const { query } = useRoute();
  const split = splitOf(query);
  const order = ORDERS.find((one) => one === query["sort"]) ?? "hardest";
  const offset = Number(query["offset"] ?? 0);
  const within = WITHIN.find((one) => one === query["within"]) ?? "prompt";
  const asked = { split, sort: order, solved: query["solved"], q: query["find"], within, offset, limit: PAGE };
  const search = useRef<HTMLInputElement>(null);
  useKeys({ "/": () => search.current?.focus() });
  const { data, error } = useResource<Prompts>(address(`runs/${run.run}/prompts`, asked), useVersion(run.run));
  const names = Object.fromEntries(ORDERS.map((one) => [one, t(NAMES[one])])) as Record<Order, string>;
  return (
    <main class="view">
      <div class="bar">
        <span class="joined">
          <Field name="find" hint={t("findPrompt")} class="search" field={search} />
          <select
            aria-label={t("searchWithin")}
            title={t("searchWithin")}
            value={within}
            onChange={(event) => patchRoute({ within: event.currentTarget.value, offset: undefined }, true)}
          >
            <option value="prompt">{t("prompt")}</option>
            <option value="ground_truth">{t("groundTruth")}</option>
            <option value="reasons">{t("reasonsOfRewards")}</option>
          </select>
        </span>
        <Segments
          options={names}
          chosen={order}
          onChoose={(key) => patchRoute({ sort: key, offset: undefined }, true)}
        />
        <SolvedFrom known={data?.solved_from ?? null} />
        <HeldOutSwitch count={run.held_out} />
        <span class="space" />
        {data && <output class="muted">{t("promptCount", { count: whole(data.total) })}</output>}
      </div>
      <Problem text={error} />
      <Partial of={data?.partial} />
      {data && data.total === 0 && !data.partial && <Nothing data={data} order={order} split={split} />}
      {data && data.prompts.length > 0 && <Table run={run.run} data={data} name={names[order]} />}
      {data && <Pages name="offset" offset={offset} size={PAGE} total={data.total} />}
    </main>
  );
}

/** The reward that counts as a solution: what the server takes, until another is given. */
function SolvedFrom({ known }: { known: number | null }) {
  const t = useText();
  const given = useRoute().query["solved"];
  const enter = (text: string): void => {
    if (text === "" || Number.isFinite(Number(text))) patchRoute({ solved: text, offset: undefined }, true);
  };
  return (
    <label title={t("solvedHint")}>
      {t("solvedFrom")}
      <input
        type="text"
        inputMode="decimal"
        class="steps"
        placeholder={known === null ? "–" : number(known)}
        value={given ?? ""}
        onChange={(event) => enter(event.currentTarget.value.trim().replace("−", "-"))}
      />
    </label>
  );
}

function Nothing({ data, order, split }: { data: Prompts; order: Order; split: Split }) {
  const t = useText();
  const unknown = data.solved_from === null && (order === "never" || order === "always");
  return (
    <>
      <p class="empty">{t(unknown ? "noVerdict" : "noPrompts")}</p>
      <LeftOut count={data.left_out} split={split} />
    </>
  );
}

function Table({ run, data, name }: { run: string; data: Prompts; name: string }) {
  const t = useText();
  return (
    <Card title={name} level={2} class="prompts" actions={<SaveTable name={name} rows={() => table(data.prompts)} />}>
      <table class="plain">
        <thead>
          <tr>
            <th>{t("prompt")}</th>
            <th class="number">{t("meanReward")}</th>
            <th class="number" title={t("changeHint")}>
              {t("firstToLast")}
            </th>
            <th class="number wide" title={t("solvedHint")}>
              {t("solvedShare")}
            </th>
            <th class="number">{t("tries")}</th>
          </tr>
        </thead>
        <tbody>
          {data.prompts.map((line) => (
            <tr key={line.prompt_id}>
              <td class="line">
                <PromptLink run={run} id={line.prompt_id}>
                  {oneLine(gist(line.prompt))}
                </PromptLink>
              </td>
              <td class="number">{number(line.mean, 3)}</td>
              <td class="number">{changeOf(line)}</td>
              <td class="number wide">{solvedOf(line)}</td>
              <td class="number">{whole(line.n)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Card>
  );
}

/** From the first step with the prompt to the last; of a single step there is no change. */
export const changeOf = ({ change, first_mean: first, last_mean: last }: PromptLine): string =>
  change === null ? "–" : `${number(first, 3)} → ${number(last, 3)} (${signed(change, 2)})`;

export const solvedOf = ({ solved, n, unscored }: PromptLine): string =>
  solved === null ? "–" : `${whole(solved)} / ${whole(n - unscored)}`;

function table(prompts: PromptLine[]): unknown[][] {
  const names = [
    "prompt_id",
    "prompt",
    "n",
    "unscored",
    "mean",
    "first_mean",
    "last_mean",
    "change",
    "solved",
  ] as const;
  return [[...names], ...prompts.map((line) => names.map((name) => line[name]))];
}

/** On the overview: the prompts at the ends of each order, which are asked for at once, and shown after its curves. */
export function PromptLists() {
  const t = useText();
  const run = useRun();
  const split = splitOf(useRoute().query);
  const seen = useAfterPaint(true);
  return (
    <section class="prompt-lists">
      <div class="section">
        <h2>{t("promptsTitle")}</h2>
        <Link to={{ view: "prompt", query: { run: run.run, ...showing(split) } }}>{t("allPrompts")}</Link>
      </div>
      <div class="charts">
        {ORDERS.slice(0, 4).map((order) => (
          <ShortList key={order} order={order} split={split} seen={seen} />
        ))}
      </div>
    </section>
  );
}

function ShortList({ order, split, seen }: { order: Order; split: Split; seen: boolean }) {
  const t = useText();
  const run = useRun();
  const url = address(`runs/${run.run}/prompts`, { split, sort: order, offset: 0, limit: SHORT });
  const { data, error } = useResource<Prompts>(url, useVersion(run.run));
  if (error) return <Problem text={error} />;
  if (!seen || !data || (data.total === 0 && data.solved_from === null)) return null;
  const all = { run: run.run, sort: order, ...showing(split) };
  const more = (
    <Link to={{ view: "prompt", query: all }} class="more" title={t("allPrompts")}>
      {t("promptCount", { count: whole(data.total) })}
    </Link>
  );
  return (
    <Card title={t(NAMES[order])} actions={more}>
      {data.total === 0 && <p class="muted">{t("noPrompts")}</p>}
      {data.prompts.map((line) => (
        <PromptLink key={line.prompt_id} run={run.run} id={line.prompt_id} class="rollout">
          <b class="number">{order === "improved" ? signed(line.change, 2) : number(line.mean, 3)}</b>
          <span class="line">{oneLine(gist(line.prompt))}</span>
        </PromptLink>
      ))}
    </Card>
  );
}
