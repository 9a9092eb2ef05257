/** What the responses say more and more often, and whether it pays. */

import { address } from "../api/client";
import { useResource } from "../api/resource";
import type { Pattern, Patterns as Answer } from "../api/types";
import { Spark, Whisker } from "../charts/spark";
import { SpreadChart } from "../charts/spread";
import { useText } from "../i18n";
import { percent, signed, whole } from "../maths/format";
import { lines } from "../maths/patterns";
import { visible } from "../maths/text";
import { Card } from "../parts/card";
import { Problem } from "../parts/failure";
import { Field } from "../parts/field";
import { HeldOutSwitch } from "../parts/held-out";
import { Pages } from "../parts/pages";
import { LeftOut, Partial } from "../parts/partial";
import { SaveTable } from "../parts/save-table";
import { Segments } from "../parts/segments";
import { selectStep, useRun, useStep, useVersion } from "../state/board";
import { go, patchRoute, useRoute } from "../state/router";
import { showing, splitOf } from "../state/selection";

const KINDS = ["all", "word", "ngram", "character"] as const;
const ORDERS = ["growth", "decline", "reward_effect", "frequency"] as const;
const PAGE = 30;
/** So many patterns are drawn as curves. */
const DRAWN = 6;

export function Patterns() {
  const t = useText();
  const run = useRun();
  const step = useStep();
  const { query } = useRoute();
  const kind = KINDS.find((one) => one === query["kind"]) ?? "all";
  const order = ORDERS.find((one) => one === query["sort"]) ?? "growth";
  const offset = Number(query["offset"] ?? 0);
  const split = splitOf(query);
  const asked = { split, kind, sort: order, q: query["find"], offset, limit: PAGE };
  const url = address(`runs/${run.run}/patterns`, asked);
  const { data, error } = useResource<Answer>(url, useVersion(run.run));
  const found = data?.patterns ?? [];
  const search = (pattern: Pattern): void =>
    go("responses", { run: run.run, q: pattern.text, sort: "-reward", ...showing(split) });
  const drawn = { lines: lines(found, DRAWN), step, onStep: selectStep, onPattern: search };
  return (
    <main class="view">
      <Choice kind={kind} order={order} heldOut={run.held_out} />
      <Problem text={error} />
      <Partial of={data?.partial} />
      {data && found.length === 0 && !data.partial && <p class="empty">{t("noPatterns")}</p>}
      {data && found.length === 0 && <LeftOut count={data.left_out ?? 0} split={split} />}
      {data && found.length > 0 && (
        <>
          <SpreadChart title={t("spreadTitle")} hint={t("spreadHint")} steps={data.steps} {...drawn} />
          <PatternTable patterns={found} onOpen={search} />
        </>
      )}
      {data && data.total > 0 && <Pages name="offset" offset={offset} size={PAGE} total={data.total} />}
    </main>
  );
}

interface ChoiceProps {
  kind: (typeof KINDS)[number];
  order: (typeof ORDERS)[number];
  /** how many held-out responses there are */
  heldOut: number;
}

function Choice({ kind, order, heldOut }: ChoiceProps) {
  const t = useText();
  const kinds = { all: t("all"), word: t("words"), ngram: t("ngrams"), character: t("characters") };
  const orders = {
    growth: t("growth"),
    decline: t("decline"),
    reward_effect: t("rewardEffect"),
    frequency: t("frequency"),
  };
  return (
    <div class="bar">
      <Segments options={kinds} chosen={kind} onChoose={(key) => patchRoute({ kind: key, offset: undefined }, true)} />
      <span class="muted">{t("sortBy")}</span>
      <Segments
        options={orders}
        chosen={order}
        onChoose={(key) => patchRoute({ sort: key, offset: undefined }, true)}
      />
      <Field name="find" hint={t("findPattern")} class="search" />
      <HeldOutSwitch count={heldOut} />
      <span class="space" />
      <span class="muted">{t("patternsHint")}</span>
    </div>
  );
}

function PatternTable({ patterns, onOpen }: { patterns: Pattern[]; onOpen: (pattern: Pattern) => void }) {
  const t = useText();
  const ends = patterns.flatMap((one) => [one.reward_effect ?? 0, ...(one.reward_effect_interval ?? [])]);
  const most = Math.max(...ends.map(Math.abs), 1e-9);
  return (
    <Card
      title={t("patterns")}
      level={2}
      class="patterns"
      actions={<SaveTable name={t("patterns")} rows={() => table(patterns)} />}
    >
      <table class="plain">
        <thead>
          <tr>
            <th>{t("pattern")}</th>
            <th class="curve">
              <span class="wide">{t("shareOverSteps")}</span>
            </th>
            <th class="number">{t("shareFirstLast")}</th>
            <th class="number wide" title={t("growthHint")}>
              {t("growth")}
            </th>
            <th class="number" title={t("rewardEffectHint")}>
              {t("rewardEffect")}
            </th>
            <th class="number wide" title={t("rewardEffectSdHint")}>
              {t("inStandardDeviations")}
            </th>
            <th class="wide" title={t("rewardEffectHint")}>
              {t("interval95")}
            </th>
            <th class="number wide">{t("rollouts")}</th>
          </tr>
        </thead>
        <tbody>
          {patterns.map((pattern) => (
            <OnePattern key={`${pattern.kind} ${pattern.text}`} pattern={pattern} most={most} onOpen={onOpen} />
          ))}
        </tbody>
      </table>
    </Card>
  );
}

interface OneProps {
  pattern: Pattern;
  most: number;
  onOpen: (pattern: Pattern) => void;
}

function OnePattern({ pattern, most, onOpen }: OneProps) {
  const t = useText();
  const { text, share, first, last, growth, reward_effect: effect, reward_effect_interval: interval } = pattern;
  const high = Math.max(0.02, ...share.filter((one) => one !== null));
  const keyed = (event: KeyboardEvent): void => void (event.key === "Enter" && onOpen(pattern));
  return (
    <tr class="click" tabIndex={0} onClick={() => onOpen(pattern)} onKeyDown={keyed}>
      <td>
        <code class="pattern">
          <bdi>{shown(text)}</bdi>
        </code>
      </td>
      <td class="curve">
        <Spark values={share} high={high} label={t("shareOverSteps")} />
      </td>
      <td class="number">
        {percent(first)} → <b>{percent(last)}</b>
      </td>
      <td class={`number wide ${(growth ?? 0) >= 0.1 ? "warning" : ""}`}>{points(growth)}</td>
      <td class="number">{signed(effect)}</td>
      <td class="number wide">{signed(pattern.reward_effect_sd)}</td>
      <td class="wide">
        <Whisker value={effect} interval={interval} most={most} label={t("rewardEffect")} />
      </td>
      <td class="number wide">{whole(pattern.rows)}</td>
    </tr>
  );
}

function table(patterns: Pattern[]): unknown[][] {
  const effects = ["reward_effect", "reward_effect_sd", "reward_effect_low", "reward_effect_high"];
  const head = ["pattern", "kind", "first", "last", "growth", ...effects, "rollouts"];
  const rows = patterns.map((one) => [
    ...[one.text, one.kind, one.first, one.last, one.growth, one.reward_effect, one.reward_effect_sd],
    ...[one.reward_effect_interval?.[0], one.reward_effect_interval?.[1], one.rows],
  ]);
  return [head, ...rows];
}

export function shown(text: string): string {
  return visible(text).replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ | $/g, "·");
}

/** Growth in percentage points. */
function points(growth: number | null): string {
  return growth === null ? "–" : `${growth > 0 ? "+" : ""}${percent(growth).replace(" %", "")}`;
}
