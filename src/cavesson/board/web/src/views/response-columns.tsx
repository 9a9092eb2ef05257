/** The columns of the table of responses. */

import type { ComponentChildren } from "preact";
import type { Label, Row, RunSummary } from "../api/types";
import { fixed, whole } from "../maths/format";
import { gist } from "../maths/prompt";
import { beginning, oneLine, visible } from "../maths/text";
import { TurnName } from "../parts/turn-label";
import { notesOf } from "../state/labels";

export interface Column {
  key: string;
  label: string;
  /** pixels; texts grow beyond */
  width: number;
  grow?: number;
  sortable: boolean;
  cell: (row: Row, labels: Label[]) => ComponentChildren;
}

/** Numbers that name something are written as filters and addresses write them. */
const NAMES = new Set(["step", "sample", "group", "policy_version", "attempt", "rank", "row"]);

const COUNTS = new Set(["length", "turns", "calls", "call_errors"]);

/** What a table shows before anybody chooses, the most wanted first; the rest is a tick away. */
const WANTED = [
  "reward",
  "step",
  "kl_k1",
  "length",
  "sample",
  "turns",
  "tools",
  "call_errors",
  "gap",
  "prompt",
  "log_ratio_max",
  "entropy",
  "finish_reason",
];

/** The response keeps so many pixels. */
const ROOM = 460;
const NARROW_ROOM = 150;

/** As many of the wanted columns as leave the response its room, in the order of the whole list. */
export function usualColumns(run: RunSummary, sort: string | undefined, width: number): string[] {
  const all = allColumns(run);
  const parts = run.columns.parts.length > 1 ? run.columns.parts.slice(0, 3).map((name) => `part/${name}`) : [];
  const chosen = ["response", sortedBy(sort)];
  let left = width - 46 - (width < 700 ? NARROW_ROOM : ROOM);
  for (const name of [...WANTED, ...parts, "repetition"].filter((name) => all.includes(name))) {
    left -= column(name).width;
    if (left < 0) break;
    chosen.push(name);
  }
  return all.filter((name) => chosen.includes(name));
}

/** What is sorted by is always shown. */
const sortedBy = (sort: string | undefined): string => (sort ?? "step").replace(/^-/, "");

/** Beside an open rollout, whose numbers are there, the texts get the room. */
export function fewColumns(sort: string | undefined): string[] {
  return [...new Set(["step", "sample", "reward", sortedBy(sort)]), "response"];
}

export function allColumns(run: RunSummary): string[] {
  const parts = run.columns.parts.map((name) => `part/${name}`);
  return [
    ...new Set([
      ...run.columns.rows,
      ...parts,
      ...(run.columns.tools?.length ? ["tools"] : []),
      ...(run.columns.texts ?? ["split", "finish_reason"]),
      "rating",
      "tags",
      "note",
      "prompt",
      "response",
    ]),
  ];
}

export function column(key: string): Column {
  if (key === "prompt")
    return {
      key,
      label: key,
      width: 180,
      grow: 1,
      sortable: false,
      cell: (row) => oneLine(beginning(gist(row.prompt), inSight())),
    };
  if (key === "response") {
    const width = Math.round(Math.min(320, innerWidth * 0.4));
    return { key, label: key, width, grow: 3, sortable: false, cell: excerpt };
  }
  if (key === "tools") return { key, label: key, width: 150, sortable: false, cell: ({ tools }) => toolsText(tools) };
  if (key === "note")
    return { key, label: key, width: 140, sortable: false, cell: (_, labels) => oneLine(notesOf(labels)) };
  if (key === "rating") return { key, label: key, width: 76, sortable: false, cell: (_, labels) => ratingText(labels) };
  if (key === "tags") return { key, label: key, width: 120, sortable: false, cell: (_, labels) => tagsText(labels) };
  if (key === "finish_reason" || key === "split") {
    return { key, label: key, width: 84, sortable: false, cell: (row) => visible(String(row[key] ?? "–")) };
  }
  // In Vietnamese the reward has the longest name.
  const width = Math.round(Math.max(key === "reward" ? 108 : 76, 24 + key.length * 6.2));
  return { key, label: key, width, sortable: true, cell: (row) => numeric(key, statistic(row, key)) };
}

export function statistic(row: Row, key: string): unknown {
  return key.startsWith("part/") ? row.parts[key.slice(5)] : row[key];
}

function numeric(key: string, value: unknown): string {
  if (NAMES.has(key)) return typeof value === "number" ? String(value) : "–";
  return COUNTS.has(key) ? whole(value) : fixed(value, typeof value === "number" && Math.abs(value) >= 100 ? 1 : 3);
}

/** No cell shows more characters of a text: what cannot be seen costs the browser as much as what can. */
const inSight = (): number => Math.ceil(innerWidth / 9);

/** The mean of all ratings. */
function ratingText(labels: Label[]): string {
  const ratings = labels.flatMap(({ name, value }) => (name === "rating" ? [Number(value)] : []));
  return ratings.length === 0 ? "–" : fixed(ratings.reduce((sum, one) => sum + one, 0) / ratings.length, 1);
}

function tagsText(labels: Label[]): ComponentChildren {
  return labels.flatMap(({ name, value }) =>
    name === "tag"
      ? [
          <span key={value} class="tool">
            {visible(String(value))}
          </span>,
        ]
      : [],
  );
}

/** Which tools were called; how often, if more than once; and how many of the calls failed. */
function toolsText(tools: Row["tools"]): ComponentChildren {
  if (!tools) return "–";
  return Object.entries(tools).map(([name, [calls, failed]]) => (
    <span key={name} class={failed > 0 ? "tool bad" : "tool"}>
      {visible(name || "?")}
      {calls > 1 && ` ×${calls}`}
      {failed > 0 && ` ✕${failed}`}
    </span>
  ));
}

/** What the policy said last, or the turn or the response with its search hit marked. */
function excerpt({ response, answer, hit, hit_turn: turn, excerpt_start: before = 0 }: Row): ComponentChildren {
  if (!hit) return oneLine(beginning(answer ?? gist(response), inSight()));
  // The hit has to be seen, so long text before it is left out.
  const near = Math.max(0, hit[0] - 40);
  const from = /[\udc00-\udfff]/.test(response.charAt(near)) ? near + 1 : near; // not inside a character
  return (
    <>
      {turn && <TurnName {...turn} />}
      {from + before > 0 && "…"}
      {oneLine(response.slice(from, hit[0]))}
      <mark>{oneLine(response.slice(...hit))}</mark>
      {oneLine(beginning(response.slice(hit[1]), inSight()))}
    </>
  );
}
