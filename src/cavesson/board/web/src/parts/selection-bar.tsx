/** What the table shows: search, filter, steps, stars, columns. */

import { useEffect, useRef, useState } from "preact/hooks";
import type { RunSummary } from "../api/types";
import { type Translate, useText } from "../i18n";
import { whole } from "../maths/format";
import { useKeys } from "../state/keys";
import { patchRoute, useRoute } from "../state/router";
import type { RowPages } from "../state/rows";
import { parseSteps } from "../state/selection";
import { allColumns } from "../views/response-columns";
import { Field } from "./field";
import { HeldOutSwitch } from "./held-out";
import { Menu } from "./menu";
import { Switch } from "./segments";

interface Props {
  run: RunSummary;
  step: number;
  pages: RowPages;
  names: string[];
  fresh: number;
  onRefresh: () => void;
}

export function SelectionBar({ run, step, pages, names, fresh, onRefresh }: Props) {
  const t = useText();
  const { query } = useRoute();
  const search = useRef<HTMLInputElement>(null);
  useKeys({ "/": () => search.current?.focus() });
  return (
    <div class="bar pad">
      <span class="joined">
        <Field name="q" hint={t("searchText")} field={search} class="search" />
        <Switch name="regex" label=".*" sign title={t("regularExpression")} />
        <select
          aria-label={t("searchWithin")}
          title={t("searchWithin")}
          value={query["within"] ?? "response"}
          onChange={({ currentTarget: { value } }) =>
            patchRoute({ within: value === "response" ? undefined : value }, true)
          }
        >
          <option value="response">{t("responses")}</option>
          <option value="prompt">{t("prompt")}</option>
          <option value="ground_truth">{t("groundTruth")}</option>
          <option value="reasons">{t("reasonsOfRewards")}</option>
        </select>
      </span>
      <Field
        name="filter"
        hint={run.columns.tools?.[0] ? `tool == "${run.columns.tools[0]}" and error` : "reward > 2 and length < 100"}
        label={t("filter")}
        title={filterTitle(t, run)}
        class="filter"
        wrong={pages.error !== null && !!query["filter"]}
      />
      <Scope step={step} />
      <Switch name="starred" label="★" sign title={t("onlyStars")} />
      <HeldOutSwitch count={run.held_out} filtered={pages.split === null} />
      <ColumnMenu run={run} names={names} />
      <span class="space" />
      {fresh > 0 && (
        <button type="button" class="on" onClick={onRefresh}>
          {t("newRollouts")}
        </button>
      )}
      {pages.stopped && <span class="warning">{pages.stopped}</span>}
      <output class="muted">
        {pages.loading ? "…" : t(pages.most > pages.total ? "atMost" : "rolloutCount", { count: whole(pages.most) })}
      </output>
    </div>
  );
}

function filterTitle(t: Translate, { columns }: RunSummary): string {
  const hint = t("filterHint", { columns: columns.rows.join(", ") });
  const calls = columns.calls?.length ? [t("filterCalls", { names: columns.calls.join(", ") })] : [];
  const spoken = columns.spoken?.length ? [t("filterSpoken", { names: columns.spoken.join(", ") })] : [];
  const texts = columns.recorded ? [t("filterRecorded", { names: columns.recorded.join(", ") })] : [];
  return [hint, ...texts, ...calls, ...spoken, t("filterLabels")].join("\n");
}

function ColumnMenu({ run, names }: { run: RunSummary; names: string[] }) {
  const t = useText();
  const all = allColumns(run);
  return (
    <Menu label={t("columns")} title={t("columns")} stays>
      {all.map((name) => (
        <label key={name}>
          <input
            type="checkbox"
            checked={names.includes(name)}
            onChange={() => patchRoute({ columns: toggled(all, names, name) }, true)}
          />
          {name}
        </label>
      ))}
    </Menu>
  );
}

/** Columns keep the order of the whole list, whichever was ticked last. */
function toggled(all: string[], names: string[], name: string): string {
  const chosen = names.includes(name) ? names.filter((one) => one !== name) : [...names, name];
  return all.filter((one) => chosen.includes(one)).join(",");
}

function Scope({ step }: { step: number }) {
  const t = useText();
  const { query } = useRoute();
  const here = query["scope"] === "step";
  const [text, setText] = useState(query["steps"] ?? "");
  useEffect(() => setText(query["steps"] ?? ""), [query["steps"]]);
  const range = parseSteps(text);
  const enter = (): void => {
    if (text === "" || range) patchRoute({ steps: range ?? undefined, scope: undefined }, true);
  };
  return (
    <span class="segments">
      <button
        type="button"
        class={!here && !query["steps"] ? "on" : ""}
        onClick={() => patchRoute({ steps: undefined, scope: undefined }, true)}
      >
        {t("allSteps")}
      </button>
      <button
        type="button"
        class={here ? "on" : ""}
        onClick={() => patchRoute({ steps: undefined, scope: "step" }, true)}
      >
        {t("stepNumber", { step })}
      </button>
      <input
        class={`steps ${text !== "" && !range ? "wrong" : ""}`}
        placeholder="0–9"
        title={t("stepRange")}
        aria-label={t("stepRange")}
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
        onBlur={enter}
        onKeyDown={(event) => event.key === "Enter" && enter()}
      />
    </span>
  );
}
