/** What an answer to a query is drawn as, and how its lines are sorted. */

import type { Maybe } from "./numbers";

export interface Answer {
  columns: string[];
  /** Arrow's or DuckDB's names */
  types: string[];
  rows: unknown[][];
}

export const KINDS = ["line", "bars", "none"] as const;
export type Kind = (typeof KINDS)[number];

/** What a reader chooses; columns by their places, from 0. */
export interface Choice {
  kind: Kind | undefined;
  across: number | undefined;
  value: number | undefined;
}

export interface Drawn {
  kind: Kind;
  /** the column along the axis */
  across: number;
  /** the column that tells curves apart */
  by: number | null;
  values: number[];
}

/** More bars, and more curves, cannot be told apart. */
export const MAX_BARS = 60;
export const MAX_CURVES = 8;

const NUMBERS = /^(u?int\d+|u?hugeint|halffloat|float|double|decimal.*)$/;

export const isNumber = ({ types }: Answer, column: number): boolean => NUMBERS.test(types[column] ?? "");

/** A line over the first column if that is a number and never repeats itself, bars if it is a text, else nothing. */
export function drawnAs(answer: Answer, choice: Choice): Drawn {
  const across = choice.across ?? 0;
  const others = answer.columns.map((_, i) => i).filter((i) => i !== across && isNumber(answer, i));
  const by = seriesColumn(answer, across);
  const kind = choice.kind ?? (others.length === 0 ? "none" : usualKind(answer, across, by));
  if (kind === "none" || others.length === 0) return { kind: "none", across, by: null, values: [] };
  const split = kind === "line" ? by : null;
  const some = kind === "bars" || split !== null ? others.slice(0, 1) : others;
  return { kind, across, by: split, values: choice.value === undefined ? some : [choice.value] };
}

function usualKind(answer: Answer, across: number, by: number | null): Kind {
  const { rows } = answer;
  if (rows.length < 2) return "none";
  if (isNumber(answer, across)) return differ(rows, [across]) || by !== null ? "line" : "none";
  return rows.length <= MAX_BARS && differ(rows, [across]) ? "bars" : "none";
}

/** The text beside a number that repeats itself, if both together do not, and each text occurs twice or more. */
function seriesColumn(answer: Answer, across: number): number | null {
  const { columns, rows } = answer;
  if (!isNumber(answer, across) || differ(rows, [across])) return null;
  const isSeries = (i: number): boolean =>
    !isNumber(answer, i) && distinct(rows, [i]) <= rows.length / 2 && differ(rows, [across, i]);
  return columns.map((_, i) => i).find(isSeries) ?? null;
}

const distinct = (rows: unknown[][], columns: number[]): number =>
  new Set(rows.map((row) => JSON.stringify(columns.map((i) => row[i])))).size;

const differ = (rows: unknown[][], columns: number[]): boolean => distinct(rows, columns) === rows.length;

const numeric = (value: unknown): Maybe => (typeof value === "number" && Number.isFinite(value) ? value : null);

export interface Curves {
  x: number[];
  curves: { name: string; values: Maybe[] }[];
  /** how many there are, of which at most `MAX_CURVES` are returned */
  total: number;
}

export function curvesOf(answer: Answer, { across, by, values }: Drawn): Curves {
  const places = answer.rows.filter((row) => numeric(row[across]) !== null);
  const rows = places.sort((a, b) => (a[across] as number) - (b[across] as number));
  if (by === null) {
    const curves = values.slice(0, MAX_CURVES).map((i) => ({
      name: answer.columns[i]!,
      values: rows.map((row) => numeric(row[i])),
    }));
    return { x: rows.map((row) => row[across] as number), curves, total: values.length };
  }
  const x = [...new Set(rows.map((row) => row[across] as number))];
  const at = new Map(x.map((place, i) => [place, i]));
  const names = [...new Set(answer.rows.map((row) => written(row[by])))];
  const curves = names.slice(0, MAX_CURVES).map((name) => {
    const line: Maybe[] = x.map(() => null);
    for (const row of rows) {
      if (written(row[by]) === name) line[at.get(row[across] as number)!] = numeric(row[values[0]!]);
    }
    return { name, values: line };
  });
  return { x, curves, total: names.length };
}

export interface Bars {
  names: string[];
  /** by value column: a number for each name */
  values: { name: string; numbers: Maybe[] }[];
}

export function barsOf({ columns, rows }: Answer, { across, values }: Drawn): Bars {
  const some = rows.slice(0, MAX_BARS);
  return {
    names: some.map((row) => written(row[across])),
    values: values.map((i) => ({ name: columns[i]!, numbers: some.map((row) => numeric(row[i])) })),
  };
}

/** A value as text; what is missing is written as in tables. */
export const written = (value: unknown): string => (value === null || value === undefined ? "–" : String(value));

/** Lines by a column: "2" ascending by the second one, "-2" descending; what is missing comes last. */
export function sortedBy(rows: unknown[][], sort: string | undefined): unknown[][] {
  const found = /^(-?)(\d+)$/.exec(sort ?? "");
  if (!found) return rows;
  const [column, sign] = [Number(found[2]) - 1, found[1] ? -1 : 1];
  const compare = (a: unknown, b: unknown): number =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a) < String(b) ? -1 : String(a) > String(b) ? 1 : 0;
  return rows.slice().sort((one, other) => {
    const [a, b] = [one[column] ?? null, other[column] ?? null];
    if (a === null || b === null) return Number(a === null) - Number(b === null);
    return sign * compare(a, b);
  });
}

/** The rollout of a line: an answer with the columns step and sample has one in each. */
export function rolloutOf({ columns }: Answer, row: unknown[]): { step: number; sample: number } | null {
  const [step, sample] = ["step", "sample"].map((name) => row[columns.indexOf(name)]);
  return Number.isInteger(step) && Number.isInteger(sample) ? { step: step as number, sample: sample as number } : null;
}

const RESERVED = new Set(["group", "column", "return", "order", "end"]);

/** A column's name as a query has to write it. */
export const nameInSql = (name: string): string =>
  /^[a-z_][a-z0-9_]*$/.test(name) && !RESERVED.has(name) ? name : `"${name.replaceAll('"', '""')}"`;
