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
const ORDERS = ["growth", "decline", "lift", "frequency"] as const;
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
    go("responses", { run: String(run.run), q: pattern.text, sort: "-reward", ...showing(split) });
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
  const orders = { growth: t("growth"), decline: t("decline"), lift: t("lift"), frequency: t("frequency") };
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
  const lifts = patterns.flatMap(({ lift, lift_interval: interval }) => [lift ?? 0, ...(interval ?? [])]).map(Math.abs);
  const most = Math.max(...lifts, 1e-9);
  return (
    <Card
      title={t("patterns")}
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
            <th class="number" title={t("liftHint")}>
              {t("lift")}
            </th>
            <th class="wide" title={t("liftHint")}>
              {t("liftInterval")}
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
  const { text, share, first, last, growth, lift } = pattern;
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
      <td class="number">{signed(lift)}</td>
      <td class="wide">
        <Whisker value={lift} interval={pattern.lift_interval} most={most} label={t("lift")} />
      </td>
      <td class="number wide">{whole(pattern.rows)}</td>
    </tr>
  );
}

function table(patterns: Pattern[]): unknown[][] {
  const head = ["pattern", "kind", "first", "last", "growth", "lift", "lift_low", "lift_high", "rollouts"];
  const rows = patterns.map(({ text, kind, first, last, growth, lift, lift_interval: interval, rows }) => [
    ...[text, kind, first, last, growth, lift, interval?.[0], interval?.[1], rows],
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
