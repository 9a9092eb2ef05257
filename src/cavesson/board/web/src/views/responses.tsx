/** All rollouts of a run in one table: sort, filter, search, and read one beside it. */

import type { VNode } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { lookAhead } from "../ahead";
import { Problem } from "../parts/failure";
import { LeftOut, Partial } from "../parts/partial";
import { RolloutDetail } from "../parts/rollout-detail";
import { parsePlace } from "../maths/sides-of-prompt";
import { openTokens } from "../parts/rollout-line";
import { SelectionBar } from "../parts/selection-bar";
import { Star } from "../parts/star";
import { Statistics } from "../parts/statistics";
import { type ListHandle, VirtualList } from "../parts/virtual-list";
import { address, getJson, onRest } from "../api/client";
import { useResource } from "../api/resource";
import { rolloutAddress } from "../api/tokens";
import type { Label, RolloutKey, Row, Rows, RunSummary, Series } from "../api/types";
import { useText } from "../i18n";
import { tokensRoute, useRun, useStep, useVersion } from "../state/board";
import { useSeries } from "../state/series";
import { useKeys } from "../state/keys";
import { patchRoute, useRoute } from "../state/router";
import { type RowPages, useRowPages } from "../state/rows";
import { PAGE, rowsAddress, type Selection, selection } from "../state/selection";
import { labelsOf, toggleStar, useLabels } from "../state/labels";
import { type Column, column, fewColumns, statistic, usualColumns } from "./response-columns";
import { Tokens } from "./tokens";

const ROW = 27;
const HEAD = 30;

export function Responses() {
  const run = useRun();
  const step = useStep();
  const { query } = useRoute();
  const version = useVersion(run.run);
  // A growing run would move rows under the reader's eyes: new ones are shown when asked for.
  const [seen, setSeen] = useState(version);
  const rows = selection(query, step);
  const pages = useRowPages(run.run, rows, seen);
  const place = parsePlace(query["at"]);
  const names =
    query["columns"]?.split(",") ?? (place ? fewColumns(query["sort"]) : usualColumns(run, query["sort"], innerWidth));
  const [index, setIndex] = useState<number | null>(null);
  const list = useRef<ListHandle>(null);
  useOpenedAt(run.run, place, rows, pages, (at) => {
    setIndex(at);
    list.current?.reveal(at);
  });

  const choose = (at: number): void => {
    const row = pages.row(at);
    if (!row) return;
    setIndex(at);
    list.current?.reveal(at);
    patchRoute({ at: `${row.step}.${row.sample}` }, true);
  };
  const move = (by: number): void => {
    const from = index ?? Math.floor(list.current?.top() ?? 0) - (by > 0 ? 1 : 0);
    choose(Math.min(pages.total - 1, Math.max(0, from + by)));
  };
  const walk = (by: number): void => {
    list.current?.focus();
    move(by);
  };
  useKeys({
    j: () => walk(1),
    k: () => walk(-1),
    Enter: () => place && openTokens(run.run, place.step, place.sample),
    s: () => place && void toggleStar(run.run, place),
    Escape: () => patchRoute({ at: undefined }, true),
  });
  useEffect(() => setIndex(null), [JSON.stringify(rows)]);
  // A column that is refused may be one that is not indexed yet.
  useEffect(() => void (pages.error && setSeen(version)), [version]);
  useLayoutEffect(() => list.current?.jump(0), [pages.shown]);
  return (
    <main class="view fills">
      <SelectionBar
        run={run}
        step={step}
        pages={pages}
        names={names}
        fresh={version - seen}
        onRefresh={() => setSeen(version)}
      />
      <Statistics run={run.run} rows={rows} pages={pages} version={seen} />
      <Partial of={pages.partial} />
      <div class={`split ${place ? "open" : ""}`}>
        <ResponseTable
          run={run}
          pages={pages}
          names={names}
          sort={query["sort"] ?? "step"}
          shown={rows}
          place={place}
          onChoose={choose}
          onArrow={move}
          list={list}
        />
        {place && (
          <RolloutDetail
            run={run.run}
            place={place}
            search={query["regex"] ? "" : (query["q"] ?? "")}
            onMove={move}
            onRead={() => lookAhead(Tokens, tokensRoute(run.run, place.step, place.sample))}
          />
        )}
      </div>
    </main>
  );
}

/** Finds the rollout that the address names when the view is opened, once its place among the rows is certain. */
function useOpenedAt(
  run: string,
  place: RolloutKey | null,
  rows: Selection,
  pages: RowPages,
  show: (index: number) => void,
): void {
  const [at] = useState(place && `${place.step}.${place.sample}`);
  const [asked] = useState(JSON.stringify(rows));
  const certain = !pages.loading && pages.most <= pages.total && asked === JSON.stringify(rows);
  const url = at && certain ? address(`runs/${run}/rows`, { ...rows, at, limit: 1 }) : null;
  const found = useResource<Rows>(url).data?.place ?? null;
  useLayoutEffect(() => void (found !== null && show(found)), [found]);
}

interface TableProps {
  run: RunSummary;
  pages: RowPages;
  names: string[];
  sort: string;
  shown: Selection;
  place: { step: number; sample: number } | null;
  onChoose: (index: number) => void;
  onArrow: (by: number) => void;
  list: { current: ListHandle | null };
}

function ResponseTable({ run, pages, names, sort, shown, place, onChoose, onArrow, list }: TableProps) {
  const t = useText();
  const of = shown.split ? `eval/${sort.replace(/^-/, "")}` : sort.replace(/^-/, "");
  const series = useSeries(run.run, [of]);
  const labels = useLabels();
  const label = t("star");
  const columns = names.map(column);
  const width = columns.reduce((sum, one) => sum + one.width, 46);
  const sorted = sort.replace(/^-/, "");
  const bar = barFor(series, of);
  const rows = useRef(new WeakMap<Row, VNode>());
  const looks = JSON.stringify([names, sort, place]);
  useMemo(() => (rows.current = new WeakMap()), [looks, labels, bar === null]);
  // A window shows more rows than the first page has.
  const ahead = (next: string) =>
    Promise.all([0, PAGE].map((offset) => getJson(rowsAddress(run.run, { ...shown, sort: next }, offset))));
  const draw = (index: number) => {
    const row = pages.row(index);
    const known = row && rows.current.get(row);
    if (known) return known;
    const drawn = drawRow(index, row);
    if (row) rows.current.set(row, drawn);
    return drawn;
  };
  const drawRow = (index: number, row: Row | undefined) => {
    if (!row) return <div key={index} class="tr" role="row" data-row={index + 1} aria-rowindex={index + 2} />;
    const own = labelsOf(labels, run.run, row);
    const chosen = place?.step === row.step && place.sample === row.sample;
    return (
      <div
        key={index}
        id={rowId(row)}
        class={`tr ${chosen ? "chosen" : ""}`}
        role="row"
        data-row={index + 1}
        aria-rowindex={index + 2}
        aria-selected={chosen}
        onClick={() => onChoose(index)}
        onMouseEnter={() => onRest(() => getJson(rolloutAddress(run.run, row)))}
        onDblClick={() => openTokens(run.run, row.step, row.sample)}
      >
        <span role="gridcell">
          <Star run={run.run} row={row} labels={labels} label={label} />
        </span>
        {columns.map((one) => cell(one, row, own, one.key === sorted ? bar : null))}
      </div>
    );
  };
  if (pages.error)
    return (
      <div class="pad">
        <Problem text={pages.error} />
      </div>
    );
  if (!pages.loading && pages.total === 0) {
    const looking = pages.partial || (pages.most > 0 && !pages.stopped);
    return (
      <div>
        <p class="empty pad">{t(looking ? "looking" : "noRows")}</p>
        <LeftOut count={pages.leftOut} split={shown.split} />
      </div>
    );
  }
  return (
    <VirtualList
      class="table"
      role="grid"
      active={place ? rowId(place) : undefined}
      label={t("responses")}
      total={pages.total}
      rowHeight={ROW}
      row={draw}
      headHeight={HEAD}
      handle={list}
      width={`max(100%, ${width}px)`}
      onRange={pages.look}
      onArrow={onArrow}
      head={<Head columns={columns} sort={sort} ahead={ahead} />}
    />
  );
}

interface HeadProps {
  columns: Column[];
  sort: string;
  /** asks for the rows in another order */
  ahead: (sort: string) => Promise<unknown>;
}

function Head({ columns, sort, ahead }: HeadProps) {
  const t = useText();
  const labels: Record<string, string> = {
    prompt: t("prompt"),
    response: t("response"),
    reward: t("reward"),
    step: t("step"),
    note: t("note"),
  };
  const sorted = sort.replace(/^-/, "");
  const turned = (key: string): string => (sort === `-${key}` ? key : `-${key}`);
  const turn = (key: string): void => {
    const next = turned(key);
    patchRoute({ sort: next }, true);
    // The pointer stays, and may turn it round.
    onRest(() => ahead(next.startsWith("-") ? key : `-${key}`));
  };
  return (
    <div class="tr head" role="row" aria-rowindex={1}>
      <span class="star" role="columnheader">
        <span class="unseen">{t("star")}</span>
      </span>
      {columns.map(({ key, label, width, grow, sortable }) => {
        const arrow = key === sorted ? (sort.startsWith("-") ? " ↓" : " ↑") : "";
        const name = labels[key] ?? label;
        const way = key === sorted ? (sort.startsWith("-") ? "descending" : "ascending") : undefined;
        return (
          <span
            key={key}
            role="columnheader"
            aria-sort={way}
            class={`td ${grow || isText(key) ? "" : "number"} ${arrow ? "sorted" : ""}`}
            style={{ width: `${width}px`, flexGrow: String(grow ?? 0) }}
          >
            {sortable ? (
              <button
                type="button"
                title={label}
                onClick={() => turn(key)}
                onMouseEnter={() => onRest(() => ahead(turned(key)))}
              >
                {name + arrow}
              </button>
            ) : (
              name
            )}
          </span>
        );
      })}
    </div>
  );
}

const isText = (key: string): boolean => ["note", "tags", "tools"].includes(key);

type Bar = (value: number) => number;

/** Bars behind the sorted column, over the middle nine tenths of what the run has. */
function barFor(series: Series | null, key: string): Bar | null {
  const rollup = series?.rollups[key];
  if (!rollup) return null;
  const low = Math.min(0, ...rollup.q05.filter((value) => value !== null));
  const high = Math.max(0, ...rollup.q95.filter((value) => value !== null));
  return high > low ? (value) => Math.min(1, Math.max(0, (value - low) / (high - low))) : null;
}

function cell({ key, width, grow, cell: content }: Column, row: Row, labels: Label[], bar: Bar | null): VNode {
  const style: Record<string, string> = { width: `${width}px`, flexGrow: String(grow ?? 0) };
  const value = bar && statistic(row, key);
  if (bar && typeof value === "number") style["backgroundSize"] = `${(bar(value) * 100).toFixed(1)}% 2px`;
  const text = grow || isText(key);
  return (
    <span key={key} class={`td ${text ? "words" : "number"} ${bar ? "bar" : ""}`} style={style} role="gridcell">
      {content(row, labels)}
    </span>
  );
}

const rowId = ({ step, sample }: RolloutKey): string => `row-${step}-${sample}`;
