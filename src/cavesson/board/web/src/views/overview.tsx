/** The run's curves, and under them the step they were clicked at. */

import type { ComponentChildren } from "preact";
import { useMemo } from "preact/hooks";
import type { Finding, Series } from "../api/types";
import { LineChart, type Mark } from "../charts/line-chart";
import type { Curve } from "../charts/line-spec";
import { type Palette, usePalette } from "../charts/palette";
import { useText } from "../i18n";
import { along } from "../maths/along";
import { number } from "../maths/format";
import { constant } from "../maths/moving";
import { ChooseAxis, useAxisNames } from "../parts/choose-axis";
import { FactList } from "../parts/facts";
import { Findings } from "../parts/findings";
import { NoteButton, NotesCard } from "../parts/notes";
import { PromptLists } from "../parts/prompt-list";
import { useDiagnosis } from "../parts/scrubber";
import { Segments, Switch } from "../parts/segments";
import { Smoothing } from "../parts/smoothing";
import { StepBrief } from "../parts/step-brief";
import { flagsOf, useNotes } from "../state/notes";
import { selectStep, useRun, useStep } from "../state/board";
import { metricNames, useSeries, useZoomed } from "../state/series";
import { patchRoute, useRoute } from "../state/router";
import {
  arranged,
  BANDS,
  type Chart,
  type Drawing,
  machineCharts,
  mainCharts,
  otherCharts,
  type Shaping,
} from "./overview-charts";

/** What the overview's curves can be drawn along: what only grows. */
const OVERVIEW_AXES = ["step", "tokens", "time"] as const;

export function Overview() {
  const t = useText();
  const run = useRun();
  const step = useStep();
  const { query } = useRoute();
  const find = query["all"] === "1" ? (query["find"] ?? "") : null;
  const known = useSeries(run.run);
  const more = [...(known?.names?.shares ?? []), ...(find === null ? [] : metricNames(known))];
  const whole = useSeries(run.run, more);
  const diagnosis = useDiagnosis(run.run);
  const shaping: Shaping = {
    smooth: Number(query["smooth"] ?? 0),
    zero: query["zero"] === "1",
    log: query["log"] === "1",
    band: BANDS.find((one) => one === query["band"]) ?? "quantiles",
  };
  const zoom = parseZoom(query["x"]);
  const series = useZoomed(run.run, whole, zoom, more);
  const axis = OVERVIEW_AXES.find((one) => one === query["axis"]) ?? "step";
  const drawing = useDrawing(whole, series, axis, shaping);
  const [charts, unchanged] = useMemo(() => {
    if (!whole || !drawing) return [[], []];
    const shown = mainCharts(drawing);
    return arranged(shown, series === whole ? shown : mainCharts({ ...drawing, series: whole }));
  }, [drawing]);
  const others = useMemo(
    () => (drawing && find !== null ? otherCharts(drawing, find) : new Map<string, Chart[]>()),
    [drawing, find],
  );
  const machine = useMemo(() => (drawing ? machineCharts(drawing) : []), [drawing]);
  const notes = useNotes(run.run);
  const colours = usePalette();
  const marks = useMarks(diagnosis.findings);
  if (!series || !drawing) return <main class="view" />;
  if (series.step.length === 0)
    return (
      <main class="view">
        <p class="empty">{t("nothingYet")}</p>
      </main>
    );
  const drawn = (chart: Chart, height?: number) => (
    <LineChart
      key={chart.spec.title}
      spec={chart.spec}
      hint={chart.hint}
      step={step}
      zoom={zoom}
      along={drawing.along}
      marks={marks}
      flags={flagsOf(notes, chart.spec.curves, colours.accent)}
      actions={<NoteButton name={keysOf(chart)[0]!} />}
      {...(height ? { height } : {})}
      onStep={selectStep}
      onZoom={(range) => patchRoute({ x: range ? `${range[0]}-${range[1]}` : undefined }, true)}
    />
  );
  return (
    <main class="view">
      <Findings run={run.run} diagnosis={diagnosis} />
      <ShapingBar shaping={shaping} zoomed={zoom !== null}>
        <ChooseAxis axis={axis} axes={OVERVIEW_AXES} series={[whole]} />
      </ShapingBar>
      <div class="charts">{charts.map((chart) => drawn(chart))}</div>
      <Unchanged charts={unchanged} />
      <NotesCard
        run={run.run}
        step={step}
        notes={notes}
        curves={[...new Set([...charts, ...unchanged].flatMap(keysOf))]}
      />
      {run.columns.rows.length > 0 && <StepBrief step={step} />}
      {run.columns.rows.length > 0 && <PromptLists />}
      <Machine charts={machine} open={query["machine"] === "1"} drawn={(chart) => drawn(chart, 90)} />
      <AllMetrics
        groups={others}
        find={find}
        onFind={(text) => patchRoute({ all: text === null ? undefined : 1, find: text ?? undefined }, true)}
        drawn={(chart) => drawn(chart, 90)}
      />
    </main>
  );
}

function useDrawing(
  whole: Series | null,
  series: Series | null,
  axis: (typeof OVERVIEW_AXES)[number],
  shaping: Shaping,
): Drawing | null {
  const t = useText();
  const colours = usePalette();
  const units = useAxisNames();
  return useMemo(() => {
    if (!whole || !series) return null;
    const unit = axis === "step" ? undefined : units[axis];
    return { series, shaping, colours, t, along: along(whole, axis), unit };
  }, [whole, series, axis, shaping.smooth, shaping.zero, shaping.log, shaping.band, colours, units.step]);
}

function useMarks(findings: Finding[]): Mark[] {
  const colours = usePalette();
  return useMemo(() => marksOf(findings, colours), [findings, colours]);
}

/** Names of what a chart draws; a smoothed curve and its original have one. */
const keysOf = ({ spec }: Chart): string[] => [
  ...new Set(spec.curves.flatMap(({ key }) => (key === undefined ? [] : [key]))),
];

function marksOf(findings: Finding[], colours: Palette): Mark[] {
  const severity = { error: colours.bad, warning: colours.warm, note: colours.muted };
  return findings.flatMap((finding) =>
    finding.since_step === null
      ? []
      : [{ step: finding.since_step, title: finding.title, colour: severity[finding.severity] }],
  );
}

interface BarProps {
  shaping: Shaping;
  zoomed: boolean;
  children: ComponentChildren;
}

function ShapingBar({ shaping, zoomed, children }: BarProps) {
  const t = useText();
  const bands = { quantiles: t("bandQuantiles"), spread: t("bandSpread"), none: t("bandNone") };
  return (
    <div class="bar">
      <Smoothing value={shaping.smooth} />
      <Switch name="zero" label={t("zeroShift")} title={t("zeroShiftHint")} />
      <Switch name="log" label={t("logAxis")} />
      <Segments options={bands} chosen={shaping.band} onChoose={(key) => patchRoute({ band: key }, true)} />
      {children}
      {zoomed && (
        <button type="button" onClick={() => patchRoute({ x: undefined }, true)}>
          {t("wholeRun")}
        </button>
      )}
      <span class="space" />
      <span class="muted">{t("chartKeys")}</span>
    </div>
  );
}

/** Curves that never change take no room, and are named with their number. */
function Unchanged({ charts }: { charts: Chart[] }) {
  const t = useText();
  if (charts.length === 0) return null;
  return (
    <details class="more">
      <summary>{t("unchanged", { count: charts.length })}</summary>
      <FactList
        facts={charts.map(({ spec }) => [spec.title, spec.curves.filter(isMeasured).map(constantText).join(" · ")])}
      />
    </details>
  );
}

const isMeasured = (curve: Curve): boolean => !curve.faint;

function constantText(curve: Curve): string {
  return `${curve.name} ${number(constant(curve.measured ?? curve.values))}`;
}

interface MachineProps {
  charts: Chart[];
  open: boolean;
  drawn: (chart: Chart) => preact.JSX.Element;
}

function Machine({ charts, open, drawn }: MachineProps) {
  const t = useText();
  if (charts.length === 0) return null;
  return (
    <Fold title={t("machine")} open={open} onFold={(open) => patchRoute({ machine: open ? 1 : undefined }, true)}>
      {open && <div class="charts small">{charts.map(drawn)}</div>}
    </Fold>
  );
}

interface AllProps {
  groups: Map<string, Chart[]>;
  /** null while closed */
  find: string | null;
  onFind: (text: string | null) => void;
  drawn: (chart: Chart) => preact.JSX.Element;
}

function AllMetrics({ groups, find, onFind, drawn }: AllProps) {
  const t = useText();
  return (
    <Fold title={t("allMetrics")} open={find !== null} onFold={(open) => onFind(open ? (find ?? "") : null)}>
      {find !== null && (
        <input
          type="search"
          placeholder={t("findMetric")}
          value={find}
          onInput={(event) => onFind(event.currentTarget.value)}
        />
      )}
      {[...groups].map(([group, charts]) => (
        <section key={group}>
          <div class="section">
            <h2>{group || t("other")}</h2>
          </div>
          <div class="charts small">{charts.map(drawn)}</div>
        </section>
      ))}
    </Fold>
  );
}

interface FoldProps {
  title: string;
  open: boolean;
  onFold: (open: boolean) => void;
  children: ComponentChildren;
}

/** What is folded until it is asked for, which the address keeps. */
function Fold({ title, open, onFold, children }: FoldProps) {
  return (
    <details
      class="more"
      open={open}
      // A view that is drawn in advance is not in the document.
      onToggle={({ currentTarget: box }) => box.isConnected && box.open !== open && onFold(box.open)}
    >
      <summary>{title}</summary>
      {children}
    </details>
  );
}

export function parseZoom(text: string | undefined): [number, number] | null {
  const found = /^(-?\d+)-(-?\d+)$/.exec(text ?? "");
  return found ? [Number(found[1]), Number(found[2])] : null;
}
