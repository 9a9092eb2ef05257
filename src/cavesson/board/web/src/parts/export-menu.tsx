/** What can be taken away: the view as one HTML file, tables, data to train on. */

import { address, getBytes, getJson, usedAnswers } from "../api/client";
import { snapshotPage } from "../api/snapshot";
import { messageOf } from "../api/resource";
import type { Rollout, Rows } from "../api/types";
import { saveFile } from "../charts/save";
import { useText } from "../i18n";
import { changedLabels } from "../state/labels";
import { boardError, runs, useRun, useStep } from "../state/board";
import { knownSeries } from "../state/series";
import { currentRoute, formatRoute, useRoute } from "../state/router";
import { PAGE, rowsAddress, type Selection, selection } from "../state/selection";
import { useState } from "preact/hooks";
import { Menu } from "./menu";

/** So many whole rollouts go into the file of a table. */
const MAX_ROLLOUTS = 200;

export function ExportMenu() {
  const t = useText();
  const run = useRun();
  const step = useStep();
  const { view, query } = useRoute();
  const [busy, setBusy] = useState(false);
  const save = (whole: boolean): void => {
    setBusy(true);
    void saveView(run.run, run.name, whole ? selection(query, step) : null)
      .catch((error: unknown) => boardError.set(messageOf(error)))
      .finally(() => setBusy(false));
  };
  const rows = view === "responses" ? selection(query, step) : { both: 1 };
  const table = (format: string): string => address(`runs/${run.run}/export`, { format, ...rows });
  return (
    <Menu label={busy ? "…" : "⤓"} title={t("export")} class="quiet icon">
      {view !== "sql" && ( // which only a server can answer
        <button type="button" onClick={() => save(false)}>
          {t("exportView")}
        </button>
      )}
      {view === "responses" && (
        <button type="button" onClick={() => save(true)}>
          {t("exportSelection", { count: MAX_ROLLOUTS })}
        </button>
      )}
      {["csv", "parquet", "jsonl"].map((format) => (
        <a key={format} href={table(format)} download>
          {t(view === "responses" ? "exportTable" : "exportRun", { format: format.toUpperCase() })}
        </a>
      ))}
      {["sft", "preference"].map((format) => (
        <a key={format} href={table(format)} download>
          {t(format === "sft" ? "exportSft" : "exportPreference")}
        </a>
      ))}
      <a href={address(`runs/${run.run}/export`, { format: "jsonl", starred: 1, both: 1 })} download>
        {t("exportStars")}
      </a>
    </Menu>
  );
}

async function saveView(run: string, name: string, rows: Selection | null): Promise<void> {
  const answers = await usedAnswers();
  if (rows) await loadRollouts(run, rows, answers);
  answers.set("api/runs", runs.get());
  for (const [number, series] of Object.entries(knownSeries())) answers.set(address(`runs/${number}/series`), series);
  const { view } = currentRoute();
  const views = rows ? [view, "tokens" as const] : [view];
  saveFile(
    `${name}-${view}.html`,
    await snapshotPage(answers, { route: formatRoute(currentRoute()), views, labels: changedLabels() }),
    "text/html",
  );
}

/** Adds the first rollouts of the selection with their tokens, so that they open without a server. */
async function loadRollouts(run: string, rows: Selection, answers: Map<string, unknown>): Promise<void> {
  for (let offset = 0; offset < MAX_ROLLOUTS; offset += PAGE) {
    const url = rowsAddress(run, rows, offset);
    const page = await getJson<Rows>(url);
    answers.set(url, page);
    await Promise.all(page.rows.map((row) => loadRollout(`runs/${run}/rollouts/${row.step}/${row.sample}`, answers)));
    if (page.rows.length < PAGE) return;
  }
}

async function loadRollout(path: string, answers: Map<string, unknown>): Promise<void> {
  const rollout = await getJson<Rollout>(address(path));
  answers.set(address(path), rollout);
  if (!rollout.tokens) return;
  const [texts, tokens] = [address(`${path}/texts`), address(`${path}/tokens`)];
  answers.set(texts, await getJson(texts));
  answers.set(tokens, await getBytes(tokens));
}
