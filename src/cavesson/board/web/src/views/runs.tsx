/** All runs of the board in one table, made from what their folders say; one is opened when it is chosen. */

import { useMemo, useRef, useState } from "preact/hooks";
import { useResource } from "../api/resource";
import { inSnapshot } from "../api/snapshot";
import type { RunLine, RunTable } from "../api/types";
import { type Key, useText } from "../i18n";
import { language } from "../i18n";
import { number, whole } from "../maths/format";
import { ago, type Band, type Line, linesOf, matching, type Sort, sorted } from "../maths/runs";
import { visible } from "../maths/text";
import { Problem } from "../parts/failure";
import { Field } from "../parts/field";
import { Link } from "../parts/link";
import { SaveTable } from "../parts/save-table";
import { Switch } from "../parts/segments";
import { listings } from "../state/board";
import { useKeys } from "../state/keys";
import { currentRoute, go, patchRoute, useRoute } from "../state/router";
import { useStore } from "../state/store";

/** Compare takes so many sides. */
const MAX_COMPARED = 6;

const COLUMNS: [Sort | null, Key][] = [
  ["run", "run"],
  ["state", "state"],
  [null, "algorithm"],
  [null, "model"],
  ["steps", "steps"],
  ["reward", "lastReward"],
  ["gain", "heldOutGain"],
  ["findings", "findings"],
  [null, "settingsDiffer"],
  ["recorded", "lastRecorded"],
];

export function Runs() {
  const t = useText();
  const { query } = useRoute();
  const { data, error } = useResource<RunTable>("api/table", useStore(listings));
  const together = query["seeds"] === "1";
  const sort = query["sort"] ?? "run";
  const find = query["find"] ?? "";
  const lines = useMemo(
    () => (data ? sorted(matching(linesOf(data, together), find), sort) : []),
    [data, together, find, sort],
  );
  const [chosen, choose] = useState<string[]>([]);
  const field = useRef<HTMLInputElement>(null);
  // A quick hand presses the next key before the page is drawn.
  const place = (): number => lines.findIndex(({ run }) => run.run === currentRoute().query["at"]);
  const move = (by: number): void => {
    const next = lines[Math.min(lines.length - 1, Math.max(0, place() < 0 ? 0 : place() + by))];
    if (!next) return;
    patchRoute({ at: next.run.run }, true);
    document.getElementById(`run ${next.run.run}`)?.scrollIntoView({ block: "nearest" });
  };
  useKeys({
    "/": () => field.current?.focus(),
    j: () => move(1),
    k: () => move(-1),
    Enter: () => {
      const line = lines[place()];
      if (line) go("overview", { run: line.run.run });
    },
  });
  const toggle = (names: string[]): void =>
    choose(
      names.every((name) => chosen.includes(name))
        ? chosen.filter((name) => !names.includes(name))
        : [...new Set([...chosen, ...names])],
    );
  if (error === null && data === null) return <main class="view" />;
  return (
    <main class="view">
      <div class="bar">
        <Field name="find" hint={t("findRun")} class="search" field={field} />
        <Switch name="seeds" label={t("groupSeeds")} title={t("groupSeedsHint")} />
        {chosen.length > 1 && (
          <Link to={{ view: "compare", query: { sides: chosen.slice(0, MAX_COMPARED).join(",") } }} class="button">
            {t("compareThese", { count: Math.min(MAX_COMPARED, chosen.length) })}
          </Link>
        )}
        <span class="space" />
        {data && <span class="muted">{t("runCount", { count: whole(data.runs.length) })}</span>}
        <SaveTable name={t("runs")} rows={() => table(lines)} />
      </div>
      <Problem text={error} />
      {data && data.runs.length === 0 && (
        <p class="empty">{t("noRuns", { folder: visible(data.folders.join(", ")) })}</p>
      )}
      {data && data.runs.length > 0 && lines.length === 0 && <p class="empty">{t("noRunFound")}</p>}
      {lines.length > 0 && (
        <div class="runs">
          <table class="plain">
            <Head sort={sort} />
            <tbody>
              {lines.map((line) => (
                <TableLine
                  key={line.run.run}
                  line={line}
                  usual={data!.usual}
                  current={line.run.run === query["at"]}
                  chosen={line.runs.every(({ run }) => chosen.includes(run))}
                  onChoose={() => toggle(line.runs.map(({ run }) => run))}
                />
              ))}
            </tbody>
          </table>
        </div>
      )}
    </main>
  );
}

function Head({ sort }: { sort: string }) {
  const t = useText();
  const by = sort.replace("-", "");
  const down = sort.startsWith("-");
  // Names are sorted from a to z first, numbers from the largest.
  const next = (name: Sort): string => (by !== name ? (name === "run" ? name : `-${name}`) : down ? name : `-${name}`);
  return (
    <thead>
      <tr>
        <td />
        {COLUMNS.map(([name, key]) => (
          <th key={key} aria-sort={name === by ? (down ? "descending" : "ascending") : undefined}>
            {name === null ? (
              t(key)
            ) : (
              <button type="button" class="quiet" onClick={() => patchRoute({ sort: next(name) }, true)}>
                {t(key)} {name === by && (down ? "↓" : "↑")}
              </button>
            )}
          </th>
        ))}
      </tr>
    </thead>
  );
}

interface LineProps {
  line: Line;
  usual: Record<string, string | null>;
  current: boolean;
  chosen: boolean;
  onChoose: () => void;
}

function TableLine({ line, usual, current, chosen, onChoose }: LineProps) {
  const t = useText();
  const { run, runs } = line;
  const steps = Math.max(...runs.map(({ steps }) => steps ?? 0));
  return (
    <tr id={`run ${run.run}`} class={current ? "current" : ""}>
      <td>
        {!inSnapshot && (
          <input type="checkbox" checked={chosen} aria-label={t("chooseRun", { name: run.name })} onChange={onChoose} />
        )}
      </td>
      <td class="name">
        {runs.map((one) => (
          <Link key={one.run} to={{ view: "overview", query: { run: one.run } }} title={one.path}>
            <bdi>{visible(one.name)}</bdi>
          </Link>
        ))}
        {run.problem !== null && <span class="error">{visible(run.problem)}</span>}
      </td>
      <td>
        <span class={`state ${run.state}`}>{t(`state_${run.state}`)}</span>
      </td>
      <td>{run.algorithm?.toUpperCase() ?? "–"}</td>
      <td class="model">
        <bdi>{run.model === null ? "–" : visible(run.model)}</bdi>
      </td>
      <td class="number">
        {steps > 0 ? whole(steps) : "–"}
        {run.planned !== null && <span class="muted"> / {whole(run.planned)}</span>}
      </td>
      <Value band={line.reward} several={runs.length > 1} />
      <Value band={line.gain} several={runs.length > 1} />
      <td>
        <FindingCounts runs={runs} />
      </td>
      <td class="settings">
        {Object.entries(run.settings).map(([name, value]) => (
          <code key={name} title={t("usualValue", { value: usual[name] ?? "–" })}>
            {visible(`${name.slice(name.lastIndexOf(".") + 1)} = ${value ?? "–"}`)}
          </code>
        ))}
      </td>
      <td class="number">
        <Age recorded={Math.max(...runs.map(({ recorded }) => recorded ?? 0))} />
      </td>
    </tr>
  );
}

function Value({ band, several }: { band: Band | null; several: boolean }) {
  const t = useText();
  if (band === null) return <td class="number">–</td>;
  return (
    <td class="number" title={t(several ? "seedsBand" : "interval95")}>
      <b>{number(band.mean, 3)}</b>
      {band.low !== null && band.high !== null && (
        <span class="muted">
          {" "}
          [{number(band.low, 3)}, {number(band.high, 3)}]
        </span>
      )}
    </td>
  );
}

function FindingCounts({ runs }: { runs: RunLine[] }) {
  const chosen = useStore(language);
  const known = runs.flatMap(({ findings }) => (findings ? [findings] : []));
  if (known.length === 0) return <>–</>;
  const titles = [...new Set(known.flatMap(({ titles }) => titles[chosen] ?? titles["en"] ?? []))];
  const counts = (["error", "warning", "note"] as const).map(
    (severity) => [severity, known.reduce((sum, one) => sum + one[severity], 0)] as const,
  );
  return (
    <span title={visible(titles.join("\n"))}>
      {counts.every(([, count]) => count === 0)
        ? "0"
        : counts.map(([severity, count]) => count > 0 && <b class={`count ${severity}`}>{count}</b>)}
    </span>
  );
}

function Age({ recorded }: { recorded: number }) {
  const t = useText();
  if (recorded === 0) return <>–</>;
  const [count, unit] = ago(Date.now() / 1000 - recorded);
  return <span title={new Date(recorded * 1000).toISOString()}>{t(`ago_${unit}`, { count })}</span>;
}

function table(lines: Line[]): unknown[][] {
  const names = ["run", "state", "algorithm", "model", "seed", "steps", "planned", "path"] as const;
  const values = (band: Band | null): unknown[] => [band?.mean, band?.low, band?.high];
  const head = [...names, "reward", "reward low", "reward high", "gain", "gain low", "gain high", "settings"];
  const rows = lines.flatMap(({ runs }) => runs);
  return [
    head,
    ...rows.map((run) => [
      ...names.map((name) => run[name]),
      ...values(run.reward),
      ...values(run.gain),
      JSON.stringify(run.settings),
    ]),
  ];
}
