/** The columns of the table of responses. */

import type { ComponentChildren } from "preact";
import type { Row, RunSummary } from "../api/types";
import { fixed, whole } from "../maths/format";
import { oneLine, visible } from "../maths/text";

export interface Column {
  key: string;
  label: string;
  /** pixels; texts grow beyond */
  width: number;
  grow?: number;
  sortable: boolean;
  cell: (row: Row) => ComponentChildren;
}

const WHOLE = new Set(["step", "sample", "group", "length", "policy_version", "attempt", "rank", "row"]);

/** What a table shows before anybody chooses; the rest is a tick away. */
const USUAL = ["step", "sample", "reward", "gap", "k1", "log_ratio_max", "length", "entropy", "repetition"];

/** In a narrower window the texts would be out of view. */
const NARROW = 1100;

export function usualColumns(run: RunSummary): string[] {
  if (innerWidth < NARROW)
    return ["step", "reward", "k1", "length", "response"].filter(
      (name) => name === "response" || run.columns.rows.includes(name),
    );
  const parts = run.columns.parts.length > 1 ? run.columns.parts.slice(0, 3).map((name) => `part/${name}`) : [];
  return [...USUAL.filter((name) => run.columns.rows.includes(name)), ...parts, "finish_reason", "prompt", "response"];
}

/** Beside an open rollout, whose numbers are there, the texts get the room. */
export function fewColumns(sort: string | undefined): string[] {
  const sorted = (sort ?? "step").replace(/^-/, "");
  return [...new Set(["step", "sample", "reward", sorted]), "response"];
}

export function allColumns(run: RunSummary): string[] {
  const parts = run.columns.parts.map((name) => `part/${name}`);
  return [
    ...new Set([
      ...run.columns.rows,
      ...parts,
      ...(run.columns.texts ?? ["split", "finish_reason"]),
      "note",
      "prompt",
      "response",
    ]),
  ];
}

export function column(key: string): Column {
  if (key === "prompt")
    return { key, label: key, width: 180, grow: 1, sortable: false, cell: (row) => oneLine(row.prompt) };
  if (key === "response") return { key, label: key, width: 320, grow: 3, sortable: false, cell: excerpt };
  if (key === "note") return { key, label: key, width: 140, sortable: false, cell: (row) => oneLine(row.note ?? "") };
  if (key === "finish_reason" || key === "split") {
    return { key, label: key, width: 84, sortable: false, cell: (row) => visible(String(row[key] ?? "–")) };
  }
  const width = Math.round(Math.max(76, 24 + key.length * 6.2));
  return { key, label: key, width, sortable: true, cell: (row) => numeric(key, statistic(row, key)) };
}

export function statistic(row: Row, key: string): unknown {
  return key.startsWith("part/") ? row.parts[key.slice(5)] : row[key];
}

function numeric(key: string, value: unknown): string {
  return WHOLE.has(key) ? whole(value) : fixed(value, typeof value === "number" && Math.abs(value) >= 100 ? 1 : 3);
}

/** The response with its search hit marked. */
function excerpt({ response, hit, excerpt_start: before = 0 }: Row): ComponentChildren {
  if (!hit) return oneLine(response);
  // The hit has to be seen, so long text before it is left out.
  const from = Math.max(0, hit[0] - 40);
  return (
    <>
      {from + before > 0 && "…"}
      {oneLine(response.slice(from, hit[0]))}
      <mark>{oneLine(response.slice(...hit))}</mark>
      {oneLine(response.slice(hit[1]))}
    </>
  );
}
