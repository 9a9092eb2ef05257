/** The run's curves, and under them the step they were clicked at. */

import { useMemo } from "preact/hooks";
import { LineChart, type Mark } from "../charts/line-chart";
import { type Palette, usePalette } from "../charts/palette";
import type { Finding } from "../api/types";
import { useText } from "../i18n";
import { Segments, Switch } from "../parts/segments";
import { Smoothing } from "../parts/smoothing";
import { StepBrief } from "../parts/step-brief";
import { useDiagnosis } from "../parts/scrubber";
import { Findings } from "../parts/findings";
import { PromptLists } from "../parts/prompt-list";
import { selectStep, useRun, useStep } from "../state/board";
import { metricNames, useSeries, useZoomed } from "../state/series";
import { patchRoute, useRoute } from "../state/router";
import { BANDS, type Chart, isOfEpisodes, mainCharts, otherCharts, type Shaping } from "./overview-charts";

export function Overview() {
  const t = useText();
  const run = useRun();
  const step = useStep();
  const { query } = useRoute();
  const find = query["all"] === "1" ? (query["find"] ?? "") : null;
  const known = useSeries(run.run);
  const more = find === null ? metricNames(known).filter(isOfEpisodes) : metricNames(known);
  const whole = useSeries(run.run, more);
  const colours = usePalette();
  const diagnosis = useDiagnosis(run.run);
  const { findings } = diagnosis;
  const shaping: Shaping = {
    smooth: Number(query["smooth"] ?? 0),
    zero: query["zero"] === "1",
    log: query["log"] === "1",
    band: BANDS.find((one) => one === query["band"]) ?? "quantiles",
  };
  const zoom = parseZoom(query["x"]);
  const series = useZoomed(run.run, whole, zoom, more);
  const marks = useMemo(() => marksOf(findings, colours), [findings, colours]);
  const shape = [series, shaping.smooth, shaping.zero, shaping.log, shaping.band, colours, t("reward")];
  const charts = useMemo(() => (series ? mainCharts(series, shaping, colours, t) : []), shape);
  const others = useMemo(
    () => (series && find !== null ? otherCharts(series, shaping, colours, find) : new Map<string, Chart[]>()),
    [...shape, find],
  );
  const drawn = (chart: Chart, height?: number) => (
    <LineChart
      key={chart.spec.title}
      spec={chart.spec}
      hint={chart.hint}
      step={step}
      zoom={zoom}
      marks={marks}
      {...(height ? { height } : {})}
      onStep={selectStep}
      onZoom={(range) => patchRoute({ x: range ? `${range[0]}-${range[1]}` : undefined }, true)}
    />
  );
  if (!series) return <main class="view" />;
  if (series.step.length === 0)
    return (
      <main class="view">
        <p class="empty">{t("nothingYet")}</p>
      </main>
    );
  return (
    <main class="view">
      <Findings run={run.run} diagnosis={diagnosis} />
      <ShapingBar shaping={shaping} zoomed={zoom !== null} />
      <div class="charts">{charts.map((chart) => drawn(chart))}</div>
      {run.columns.rows.length > 0 && <StepBrief step={step} />}
      {run.columns.rows.length > 0 && <PromptLists />}
      <AllMetrics
        groups={others}
        find={find}
        onFind={(text) => patchRoute({ all: text === null ? undefined : 1, find: text ?? undefined }, true)}
        drawn={(chart) => drawn(chart, 90)}
      />
    </main>
  );
}

function marksOf(findings: Finding[], colours: Palette): Mark[] {
  const severity = { error: colours.bad, warning: colours.warm, note: colours.muted };
  return findings.flatMap((finding) =>
    finding.since_step === null
      ? []
      : [{ step: finding.since_step, title: finding.title, colour: severity[finding.severity] }],
  );
}

function ShapingBar({ shaping, zoomed }: { shaping: Shaping; zoomed: boolean }) {
  const t = useText();
  const bands = { quantiles: t("bandQuantiles"), spread: t("bandSpread"), none: t("bandNone") };
  return (
    <div class="bar">
      <Smoothing value={shaping.smooth} />
      <Switch name="zero" label={t("zeroShift")} title={t("zeroShiftHint")} />
      <Switch name="log" label={t("logAxis")} />
      <Segments options={bands} chosen={shaping.band} onChoose={(key) => patchRoute({ band: key }, true)} />
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
    <details
      class="more"
      open={find !== null}
      // A view that is drawn in advance is not in the document.
      onToggle={(event) => event.currentTarget.isConnected && onFind(event.currentTarget.open ? (find ?? "") : null)}
    >
      <summary>{t("allMetrics")}</summary>
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
    </details>
  );
}

export function parseZoom(text: string | undefined): [number, number] | null {
  const found = /^(-?\d+)-(-?\d+)$/.exec(text ?? "");
  return found ? [Number(found[1]), Number(found[2])] : null;
}
