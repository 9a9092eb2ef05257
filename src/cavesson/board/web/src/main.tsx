import { render } from "preact";
import { App } from "./app";
import { painted } from "./api/client";
import { follow } from "./api/live";
import { inSnapshot, snapshotRoute } from "./api/snapshot";
import { language, loadOtherWords, loadWords } from "./i18n";
import { loadRuns, runs } from "./state/board";
import { applyTheme } from "./state/preferences";
import { currentRoute, go, parseRoute } from "./state/router";
import { showOnlyVisible } from "./safe-text";
import { askEarly } from "./state/series";
import "uplot/dist/uPlot.min.css";
import "./style/base.css";
import "./style/shell.css";
import "./style/cards.css";
import "./style/table.css";
import "./style/views.css";
import "./style/tokens.css";
import "./style/conversation.css";
import "./style/print.css";

showOnlyVisible();
applyTheme();
if (inSnapshot && location.hash === "") {
  const { view, query } = parseRoute(snapshotRoute());
  go(view, query, true);
}
const loaded = loadRuns();
void loaded.then(beginWithTable).then(painted).then(follow).then(loadOtherWords);
askEarly(shownRun());
/** The run in the address; without one, the first of the board if it is open. */
async function shownRun(): Promise<string | undefined> {
  const named = currentRoute().query["run"];
  if (named !== undefined) return named;
  await loaded;
  const first = runs.get()?.[0];
  return first && first.opened !== false ? first.run : undefined;
}

/** Without a run in the address, a folder is shown by its table. */
function beginWithTable(): void {
  const { view, query, unknown } = currentRoute();
  const all = runs.get();
  const isFolder = all?.length === 0 || all?.some(({ opened }) => opened === false);
  if (isFolder && view === "overview" && unknown === undefined && query["run"] === undefined) go("runs", {}, true);
}

void loadWords(language.get()).then(() => render(<App />, document.getElementById("app")!));
