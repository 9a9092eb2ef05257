import { slow } from "../api/client";
import { connection } from "../api/live";
import { inSnapshot } from "../api/snapshot";
import { LANGUAGES, type Language, language, speak, useText } from "../i18n";
import { whole } from "../maths/format";
import { runs, useRun, viewRoute } from "../state/board";
import { theme } from "../state/preferences";
import { patchRoute, type Route, SHOWN_VIEWS, useRoute } from "../state/router";
import { useStore } from "../state/store";
import { ExportMenu } from "./export-menu";
import { Link } from "./link";

/** A line that moves while the server works on something that takes its time. */
function Working() {
  return useStore(slow) ? <i class="working" /> : null;
}

interface Props {
  /** of the page, for who does not see which tab is chosen */
  heading: string;
  onHelp: () => void;
  /** when the pointer rests on a tab */
  onPoint: (to: Route) => void;
}

export function TopBar({ heading, onHelp, onPoint }: Props) {
  const t = useText();
  const { view, unknown } = useRoute();
  const run = useRun();
  const several = useStore(runs)!.length > 1 || view === "runs" || run.opened === false;
  return (
    <header class="top">
      <h1 class="unseen">{heading}</h1>
      <Link to={{ view: "overview", query: { run: run.run } }} class="brand">
        <Logo />
        <span>Cavesson</span>
      </Link>
      {view !== "runs" && <RunChoice />}
      <nav class="tabs">
        {SHOWN_VIEWS.filter((name) => name !== "runs" || several).map((name) => (
          <Link key={name} to={viewRoute(name, run)} current={name === view && unknown === undefined} onPoint={onPoint}>
            {t(name)}
          </Link>
        ))}
      </nav>
      <span class="space" />
      {view !== "runs" && <Status />}
      {!inSnapshot && <ExportMenu />}
      <LanguageChoice />
      <ThemeButton />
      <button type="button" class="quiet icon keyboard" title={t("keys")} aria-label={t("keys")} onClick={onHelp}>
        ?
      </button>
      <Working />
    </header>
  );
}

function RunChoice() {
  const t = useText();
  const all = useStore(runs)!;
  const run = useRun();
  if (all.length === 1) {
    return (
      <b class="run" title={run.path}>
        {run.name}
      </b>
    );
  }
  const choose = (name: string): void => patchRoute({ run: name, step: undefined, sample: undefined, at: undefined });
  return (
    <select
      class="run"
      value={run.run}
      disabled={useRoute().view === "compare"}
      title={run.path}
      aria-label={t("run")}
      onChange={(event) => choose(event.currentTarget.value)}
    >
      {all.map((one) => (
        <option key={one.run} value={one.run}>
          {one.name}
        </option>
      ))}
    </select>
  );
}

function LanguageChoice() {
  const t = useText();
  return (
    <select
      class="language"
      value={useStore(language)}
      aria-label={t("language")}
      onChange={(event) => void speak(event.currentTarget.value as Language)}
    >
      {Object.entries(LANGUAGES).map(([code, name]) => (
        <option key={code} value={code}>
          {name}
        </option>
      ))}
    </select>
  );
}

function Status() {
  const t = useText();
  const run = useRun();
  const state = useStore(connection);
  const following = run.live && state === "open";
  const title = inSnapshot ? "" : t(state === "lost" ? "connectionLost" : run.live ? "live" : "notLive");
  return (
    <span class="status" title={title}>
      {!inSnapshot && <i class={`dot ${state === "lost" ? "lost" : following ? "open live" : ""}`} />}
      <span class="long">{run.algorithm?.toUpperCase()}</span>
      <span>{t("rolloutCount", { count: whole(run.rollouts) })}</span>
      {run.held_out > 0 && <span class="long">{t("heldOutCount", { count: whole(run.held_out) })}</span>}
      {run.partial && (
        <span class="warning" title={t("partial", { indexed: whole(run.partial.indexed), of: whole(run.partial.of) })}>
          {t("indexing", { share: Math.floor(run.indexed * 100) })}
        </span>
      )}
    </span>
  );
}

function ThemeButton() {
  const t = useText();
  const chosen = useStore(theme);
  const next = { auto: "light", light: "dark", dark: "auto" } as const;
  const sign = { auto: "◐", light: "○", dark: "●" }[chosen];
  const name = t(({ auto: "themeAuto", light: "themeLight", dark: "themeDark" } as const)[chosen]);
  return (
    <button type="button" class="quiet icon" title={name} aria-label={name} onClick={() => theme.set(next[chosen])}>
      {sign}
    </button>
  );
}

function Logo() {
  return (
    <svg viewBox="0 0 32 32" aria-hidden="true">
      <rect width="32" height="32" rx="7" fill="#17605a" />
      <path
        d="M6 23c4 0 4-7 8-7s3 4 6 4 3-11 6-11"
        fill="none"
        stroke="#fff"
        stroke-width="2.6"
        stroke-linecap="round"
      />
      <circle cx="26" cy="9" r="2.4" fill="#f0a35e" />
    </svg>
  );
}
