/** Which rollouts the table shows, as parameters of the server's requests. */

import { address } from "../api/client";
import type { Query } from "./router";

/** Responses that were trained on, as the server shows them without being told, or held-out ones. */
export type Split = "eval" | undefined;

export const splitOf = (query: Query): Split => (query["held_out"] === "1" ? "eval" : undefined);

/** What an address has to say so that it shows a split. */
export const showing = (split: Split): Query => (split ? { held_out: "1" } : {});

export interface Selection extends Record<string, string | undefined> {
  split?: Split;
  sort?: string | undefined;
  steps?: string | undefined;
  filter?: string | undefined;
  q?: string | undefined;
  regex?: string | undefined;
  within?: string | undefined;
  starred?: string | undefined;
}

/** `scope=step` follows the step looked at; otherwise `steps` is a range, or all. */
export function selection(query: Query, step: number): Selection {
  const { sort, filter, q, regex, within, starred } = query;
  const steps = query["scope"] === "step" ? `${step}-${step}` : query["steps"];
  return {
    split: splitOf(query),
    sort,
    steps,
    filter,
    q,
    regex: q ? regex : undefined,
    within: q ? within : undefined,
    starred,
  };
}

/** "12", "3-40" and "1,200–1,300" as the server wants them; anything else is null. */
export function parseSteps(text: string): string | null {
  const plain = text.replace(/\b\d{1,3}(,\d{3})+\b/g, (number) => number.replaceAll(",", ""));
  const found = /^\s*(\d+)\s*(?:[-–]\s*(\d+)\s*)?$/.exec(plain);
  if (!found) return null;
  const [first, last] = [Number(found[1]), Number(found[2] ?? found[1])];
  return first <= last ? `${first}-${last}` : null;
}

/** Rows are asked for in pages of this size: what fits into a window and a little more. */
export const PAGE = 25;

export function rowsAddress(run: string, rows: Selection, offset: number): string {
  return address(`runs/${run}/rows`, { ...rows, offset, limit: PAGE });
}
