/** What the responses say more and more often, and whether it pays. */

import { address } from "../api/client";
import { useResource } from "../api/resource";
import type { Pattern, Patterns as Answer } from "../api/types";
import { Spark, Whisker } from "../charts/spark";
import { SpreadChart } from "../charts/spread";
import { useText } from "../i18n";
import { percent, signed, whole } from "../maths/format";
import { visible } from "../maths/text";
import { Problem } from "../parts/failure";
import { Segments } from "../parts/segments";
import { selectStep, useRun, useStep, useVersion } from "../state/board";
import { go, patchRoute, useRoute } from "../state/router";

const KINDS = ["all", "word", "ngram", "character"] as const;
const ORDERS = ["growth", "decline", "lift", "frequency"] as const;
/** So many patterns are drawn as curves. */
const DRAWN = 6;

export function Patterns() {
  const t = useText();
  const run = useRun();
  const step = useStep();
  const { query } = useRoute();
  const kind = KINDS.find((one) => one === query["kind"]) ?? "all";
  const order = ORDERS.find((one) => one === query["sort"]) ?? "growth";
  const url = address(`runs/${run.run}/patterns`, { kind, sort: order, limit: 60 });
  const { data, error } = useResource<Answer>(url, useVersion(run.run));
  const found = distinct(data?.patterns ?? []);
  const search = (pattern: Pattern): void =>
    go("responses", { run: String(run.run), q: pattern.text, sort: "-reward" });
  const drawn = { patterns: found.slice(0, DRAWN), step, onStep: selectStep, onPattern: search };
  return (
    <main class="view">
      <Choice kind={kind} order={order} />
      <Problem text={error} />
      {data && (data.indexed ?? 1) < 1 && (
        <p class="warning">{t("indexing", { share: Math.floor((data.indexed ?? 0) * 100) })}</p>
      )}
      {data && found.length === 0 && <p class="empty">{t("noPatterns")}</p>}
      {data && found.length > 0 && (
        <>
          <SpreadChart title={t("spreadTitle")} hint={t("spreadHint")} steps={data.steps} {...drawn} />
          <PatternTable patterns={found} onOpen={search} />
        </>
      )}
    </main>
  );
}

function Choice({ kind, order }: { kind: (typeof KINDS)[number]; order: (typeof ORDERS)[number] }) {
  const t = useText();
  const kinds = { all: t("all"), word: t("words"), ngram: t("ngrams"), character: t("characters") };
  const orders = { growth: t("growth"), decline: t("decline"), lift: t("lift"), frequency: t("frequency") };
  return (
    <div class="bar">
      <Segments options={kinds} chosen={kind} onChoose={(key) => patchRoute({ kind: key }, true)} />
      <span class="muted">{t("sortBy")}</span>
      <Segments options={orders} chosen={order} onChoose={(key) => patchRoute({ sort: key }, true)} />
      <span class="space" />
      <span class="muted">{t("patternsHint")}</span>
    </div>
  );
}

/** A sign that stands alone is a word and a character: once is enough. */
function distinct(patterns: Pattern[]): Pattern[] {
  const seen = new Set<string>();
  return patterns.filter(({ text }) => !seen.has(text) && seen.add(text));
}

function PatternTable({ patterns, onOpen }: { patterns: Pattern[]; onOpen: (pattern: Pattern) => void }) {
  const t = useText();
  const lifts = patterns.flatMap(({ lift, lift_interval: interval }) => [lift ?? 0, ...(interval ?? [])]).map(Math.abs);
  const most = Math.max(...lifts, 1e-9);
  return (
    <table class="plain patterns">
      <thead>
        <tr>
          <th>{t("pattern")}</th>
          <th>{t("shareOverSteps")}</th>
          <th class="number">{t("shareFirstLast")}</th>
          <th class="number">{t("growth")}</th>
          <th class="number" title={t("liftHint")}>
            {t("lift")}
          </th>
          <th title={t("liftHint")}>{t("liftInterval")}</th>
          <th class="number">{t("rollouts")}</th>
        </tr>
      </thead>
      <tbody>
        {patterns.map((pattern) => (
          <tr
            key={`${pattern.kind} ${pattern.text}`}
            class="click"
            tabIndex={0}
            onClick={() => onOpen(pattern)}
            onKeyDown={(event) => event.key === "Enter" && onOpen(pattern)}
          >
            <td>
              <code class="pattern">
                <bdi>{shown(pattern.text)}</bdi>
              </code>
            </td>
            <td>
              <Spark
                values={pattern.share}
                high={Math.max(0.02, ...pattern.share.filter((share) => share !== null))}
                label={t("shareOverSteps")}
              />
            </td>
            <td class="number">
              {percent(pattern.first)} → <b>{percent(pattern.last)}</b>
            </td>
            <td class={`number ${(pattern.growth ?? 0) >= 0.1 ? "warning" : ""}`}>{points(pattern.growth)}</td>
            <td class="number">{signed(pattern.lift)}</td>
            <td>
              <Whisker value={pattern.lift} interval={pattern.lift_interval} most={most} label={t("lift")} />
            </td>
            <td class="number">{whole(pattern.rows)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

export function shown(text: string): string {
  return visible(text).replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ | $/g, "·");
}

/** Growth in percentage points. */
function points(growth: number | null): string {
  return growth === null ? "–" : `${growth > 0 ? "+" : ""}${percent(growth).replace(" %", "")}`;
}
