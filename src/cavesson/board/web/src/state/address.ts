/** A view and its query, as the address bar has them. */

export const VIEWS = [
  "runs",
  "overview",
  "step",
  "responses",
  "prompt",
  "tokens",
  "patterns",
  "compare",
  "sql",
  "settings",
] as const;
export type View = (typeof VIEWS)[number];
export type Query = Record<string, string>;

export interface Route {
  view: View;
  query: Query;
  /** the name of a view that there is not */
  unknown?: string;
}

/** undefined and "" take a key out. */
export type Patch = Record<string, string | number | undefined>;

export function parseRoute(address: string): Route {
  const [path = "", search = ""] = address.split("?", 2);
  const name = path.slice(path.lastIndexOf("/") + 1);
  const query = Object.fromEntries(new URLSearchParams(search));
  if (name === "" || name === "index.html") return { view: "overview", query };
  const view = VIEWS.find((candidate) => candidate === name);
  return view ? { view, query } : { view: "overview", query, unknown: name };
}

/** One level only, so that the page's relative addresses hold behind any path prefix. */
export function formatRoute({ view, query, unknown: name = view }: Route): string {
  const search = new URLSearchParams(query).toString();
  return search ? `${name}?${search}` : name;
}

export function patched(query: Query, patch: Patch): Query {
  const merged: Query = { ...query };
  for (const [key, value] of Object.entries(patch)) {
    if (value === undefined || value === "") delete merged[key];
    else merged[key] = String(value);
  }
  return merged;
}
