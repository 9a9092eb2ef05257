/** The frame around every view: runs, tabs, the run's strip, language and colours, keys. */

import { useEffect, useLayoutEffect, useState } from "preact/hooks";
import { lookAhead } from "./ahead";
import { Failure, useMessage } from "./parts/failure";
import { Help } from "./parts/help";
import { Scrubber } from "./parts/scrubber";
import { TopBar } from "./parts/top-bar";
import { NO_ANSWER } from "./api/client";
import { connection } from "./api/live";
import { inSnapshot } from "./api/snapshot";
import type { RunSummary } from "./api/types";
import { language, useText } from "./i18n";
import { boardError, moveStep, runs, selectStep, useOpened, useRun, viewRoute } from "./state/board";
import { useKeys } from "./state/keys";
import { whole } from "./maths/format";
import { parseSides } from "./maths/sides";
import { theme } from "./state/preferences";
import { go, type Route, SHOWN_VIEWS, useRoute, type View } from "./state/router";
import { useStore } from "./state/store";
import { visible } from "./maths/text";
import { PAGES } from "./views/pages";
import { Runs } from "./views/runs";

const LETTERS: Record<View, string> = {
  runs: "u",
  overview: "o",
  step: "s",
  responses: "r",
  prompt: "q",
  tokens: "t",
  patterns: "p",
  compare: "c",
  sql: "l",
  settings: "e",
};

/** Views of a run that need no rollouts. */
const ANY_RUN: View[] = ["overview", "sql", "settings"];

const ahead = (to: Route): void => lookAhead(PAGES[to.view], to);

export function App() {
  const all = useStore(runs);
  const error = useStore(boardError);
  const chosen = useStore(language);
  useEffect(() => {
    document.documentElement.lang = chosen === "zh" ? "zh-Hans" : chosen;
  }, [chosen]);
  if (error !== null && all === null) return <Failure text={error} />;
  if (all === null) return <div class="shell" />;
  return all.length === 0 ? <NoRuns /> : <Board />;
}

/** A board of an empty folder, until a run appears. */
function NoRuns() {
  return (
    <div class="shell">
      <div />
      <div />
      <Runs />
    </div>
  );
}

function Board() {
  const t = useText();
  const { view, query, unknown } = useRoute();
  const run = useRun();
  const missing = useMissing(run);
  const sides = parseSides(query["sides"] ?? "").map((side) => side.run);
  const failed = useOpened(view === "runs" ? [] : view === "compare" && sides.length > 0 ? sides : [run.run]);
  const message = useMessage();
  const refused = useStore(boardError);
  const error = useStore(connection) === "lost" ? NO_ANSWER : refused;
  const [help, setHelp] = useState(false);
  const heading = [...(view === "runs" ? [] : [run.name]), ...(unknown === undefined ? [t(view)] : [])].join(" · ");
  const title = `${heading} · Cavesson`;
  useLayoutEffect(() => void (document.title = visible(title)), [title]);
  const views = SHOWN_VIEWS.map((name) => [`g ${LETTERS[name]}`, () => show(name, run)] as const);
  useKeys({
    ...Object.fromEntries(views),
    "?": () => setHelp(!help),
    "[": () => moveStep(-1),
    "]": () => moveStep(1),
    "{": () => moveStep(-Infinity),
    "}": () => selectStep(undefined),
    d: () => theme.set(document.documentElement.dataset["theme"] === "dark" ? "light" : "dark"),
  });
  const Page = PAGES[view];
  return (
    <div class="shell">
      <TopBar heading={visible(heading)} onHelp={() => setHelp(true)} onPoint={ahead} />
      <div>
        {inSnapshot && (
          <div class="banner" role="status">
            {t("exportedPage")}
          </div>
        )}
        {error !== null && (
          <div class="banner error" role="alert">
            {message(error)}
          </div>
        )}
        {run.problem && (
          <div class="banner error" role="alert">
            {run.problem}
          </div>
        )}
        {view !== "runs" && run.opened !== false && (
          <Scrubber onPoint={(at) => ahead({ view, query: { ...query, step: String(at) } })} />
        )}
      </div>
      {missing === null && failed === null ? (
        <Page key={view === "runs" ? "" : run.run} />
      ) : (
        <main class="view">
          <p class="empty">{failed === null ? missing : visible(failed)}</p>
        </main>
      )}
      {help && <Help onClose={() => setHelp(false)} />}
    </div>
  );
}

/** Why there is nothing to see at an address; null if there is. */
function useMissing(run: RunSummary): string | null {
  const t = useText();
  const { view, query, unknown } = useRoute();
  const all = useStore(runs)!;
  const [asked, step] = [query["run"], query["step"]];
  if (view === "runs" && unknown === undefined) return null;
  if (unknown !== undefined) return t("noPage", { page: visible(unknown) });
  if (view === "compare") {
    const side = parseSides(query["sides"] ?? "").find((side) => all.every((run) => run.run !== side.run));
    return side ? t("noRun", { run: side.run }) : null;
  }
  if (asked !== undefined && asked !== run.run) return t("noRun", { run: asked });
  if (run.opened === false) return t("opening");
  if (run.gone) return t("runGone", { path: visible(run.path) });
  const { steps, partial } = run;
  const indexing = partial && t("partial", { indexed: whole(partial.indexed), of: whole(partial.of) });
  if (steps && step !== undefined && !(Number(step) >= steps[0] && Number(step) <= steps[1]))
    return indexing ?? t("noStep", { step, first: steps[0], last: steps[1] });
  if (run.columns.rows.length > 0 || ANY_RUN.includes(view)) return null;
  return indexing ?? t(steps ? "noRollouts" : "nothingYet");
}

function show(view: View, run: RunSummary): void {
  const route = viewRoute(view, run);
  go(route.view, route.query);
}
