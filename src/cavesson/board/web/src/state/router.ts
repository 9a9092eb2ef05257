/** The address bar is the page's state: a view and its query reproduce what is seen. */

import { createContext } from "preact";
import { useContext } from "preact/hooks";
import { beginView } from "../api/client";
import { inSnapshot, snapshotViews } from "../api/snapshot";
import { formatRoute, parseRoute, type Patch, patched, type Query, type Route, type View, VIEWS } from "./address";
import { createStore, useStore } from "./store";

export { formatRoute, parseRoute, type Query, type Route, type View } from "./address";

/** The views that there are tabs for: an exported page has only its own. */
export const SHOWN_VIEWS = inSnapshot ? snapshotViews() : VIEWS;

// A file opened from disk may not change its path, so an exported page keeps its route behind the #.
const current = (): string => (inSnapshot ? location.hash.slice(1) : location.pathname + location.search);

const route = createStore<Route>(parseRoute(current()));

/** Each view comes back as it was left; the run, the step and the split are shared by all. */
const left: Partial<Record<View, Query>> = {};
const SHARED = ["run", "step", "sample", "held_out"];

/** Where somebody may go next, for a view that is drawn in advance. */
export const Ahead = createContext<Route | null>(null);

export function useRoute(): Route {
  const here = useStore(route);
  return useContext(Ahead) ?? here;
}

export function currentRoute(): Route {
  return route.get();
}

export function go(view: View, query: Query, replace = false): void {
  const next = { view, query };
  if (formatRoute(next) === formatRoute(route.get())) return;
  const address = (inSnapshot ? "#" : "") + formatRoute(next);
  try {
    history[replace ? "replaceState" : "pushState"](null, "", address);
  } catch {
    // Browsers refuse more than some hundred changes in ten seconds; the address follows with the next one.
  }
  show(next);
}

function show(next: Route): void {
  const before = route.get();
  left[before.view] = before.query;
  if (next.view !== before.view) beginView();
  route.set(next);
}

/** Changes keys of the present view's query. */
export function patchRoute(patch: Patch, replace = false): void {
  const { view, query } = route.get();
  go(view, patched(query, patch), replace);
}

/** Where a view's tab leads. */
export function tabRoute(view: View): Route {
  const { query } = route.get();
  if (view === "runs") return { view, query: left[view] ?? {} };
  const shared = Object.fromEntries(SHARED.flatMap((key) => (query[key] === undefined ? [] : [[key, query[key]!]])));
  const kept = Object.fromEntries(Object.entries(left[view] ?? {}).filter(([key]) => !SHARED.includes(key)));
  return { view, query: { ...kept, ...shared } };
}

addEventListener("popstate", () => show(parseRoute(current())));
