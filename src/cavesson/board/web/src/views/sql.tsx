/** Queries in SQL: an editor with examples and the columns that there are, and the answer as a chart and a table. */

import { useEffect, useRef, useState } from "preact/hooks";
import { address } from "../api/client";
import { useResource } from "../api/resource";
import type { SqlTables } from "../api/types";
import { useText } from "../i18n";
import { whole } from "../maths/format";
import { Problem } from "../parts/failure";
import { SqlAnswerPart } from "../parts/sql-answer";
import { Examples, Tables } from "../parts/sql-tables";
import { useRun, useVersion } from "../state/board";
import { useKeys } from "../state/keys";
import type { Patch } from "../state/address";
import { patchRoute, useRoute } from "../state/router";
import { type Asked, drafts, forgetAnswer, useAnswer } from "../state/sql";

/** So many lines are asked for at first. */
const LINES = 1000;

export function Sql() {
  const t = useText();
  const run = useRun();
  const { query } = useRoute();
  const editor = useRef<HTMLTextAreaElement>(null);
  const [text, setText] = useDraft(run.run, query["query"] ?? "");
  const [again, setAgain] = useState(0);
  const limit = Number(query["limit"]) || LINES;
  const asked: Asked | null = query["query"] ? { run: run.run, query: query["query"], limit } : null;
  const answering = useAnswer(asked, again);
  const { data: known, error } = useResource<SqlTables>(address(`runs/${run.run}/tables`), useVersion(run.run));
  const ask = (wanted: string): void => {
    if (wanted.trim() === "") return;
    setText(wanted);
    forgetAnswer({ run: run.run, query: wanted, limit });
    if (wanted === query["query"]) setAgain(again + 1);
    else patchRoute({ query: wanted, ...NEW });
  };
  const insert = (name: string): void => {
    const field = editor.current!;
    field.focus();
    field.setRangeText(name, field.selectionStart, field.selectionEnd, "end");
    setText(field.value);
  };
  useKeys({ "/": () => editor.current?.focus() });
  return (
    <main class="view sql">
      <div class="stack">
        <textarea
          ref={editor}
          rows={Math.min(16, Math.max(5, text.split("\n").length))}
          aria-label={t("sqlQuery")}
          placeholder={known?.examples[0]?.query}
          spellcheck={false}
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.isComposing) return; // the key chooses a character
            if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask(text);
            if (event.key === "Escape") event.currentTarget.blur();
          }}
        />
        <div class="bar">
          <button type="button" class="on" title={t("runQueryHint")} onClick={() => ask(text)}>
            {t("runQuery")}
          </button>
          {answering.running && (
            <button type="button" onClick={answering.cancel}>
              {t("cancel")}
            </button>
          )}
          <output class="muted">{answering.running ? t("queryRuns") : answering.cancelled && t("cancelled")}</output>
          <span class="space" />
          {known && (
            <span class="muted">
              {t("sqlLimits", {
                seconds: known.limits.seconds,
                memory: known.limits.memory / 2 ** 20,
                count: whole(known.limits.lines),
              })}
            </span>
          )}
        </div>
        <Problem text={answering.error} />
        {answering.data && <SqlAnswerPart run={run} answer={answering.data} most={known?.limits.lines ?? limit} />}
      </div>
      <div class="stack">
        <Problem text={error} />
        {known && <Examples examples={known.examples} onChoose={ask} />}
        {known && <Tables tables={known.tables} onInsert={insert} />}
      </div>
    </main>
  );
}

/** What another query begins with anew. */
const NEW: Patch = Object.fromEntries(
  ["limit", "chart", "across", "value", "sort", "offset", "x"].map((key) => [key, undefined]),
);

/** What stands in the editor: what the address asks, until the reader types; it outlives a look at another view. */
function useDraft(run: string, asked: string): [string, (text: string) => void] {
  const [text, setText] = useState(drafts.get(run) ?? asked);
  const before = useRef(asked);
  const set = (next: string): void => {
    drafts.set(run, next);
    setText(next);
  };
  useEffect(() => {
    if (asked !== before.current) set((before.current = asked));
  }, [asked]);
  return [text, set];
}
