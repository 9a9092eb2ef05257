/** The curves of several runs, laid over each other step by step. */

import { useMemo } from "preact/hooks";
import type { Series } from "../api/types";
import { LineChart } from "../charts/line-chart";
import { curveColour, type Palette, usePalette } from "../charts/palette";
import type { Curve, LineSpec } from "../charts/line-spec";
import { useText } from "../i18n";
import { aligned } from "../maths/series";
import type { Side } from "../maths/sides";
import { Smoothing } from "./smoothing";
import { runs } from "../state/board";
import { metricNames, useSeries, useZoomed } from "../state/series";
import { patchRoute, useRoute } from "../state/router";
import { splitOf } from "../state/selection";
import { useStore } from "../state/store";
import { shaped } from "../views/overview-charts";
import { parseZoom } from "../views/overview";

const USUAL = ["reward", "kl_k1", "length", "entropy"];

/** Runs load one hook each, so another number of them is another component. */
export function ComparedCurves({ sides }: { sides: Side[] }) {
  const wanted = [...new Set(sides.map(({ run }) => run))];
  return <Loaded key={wanted.join()} wanted={wanted} sides={sides} />;
}

function Loaded({ wanted, sides }: { wanted: string[]; sides: Side[] }) {
  const colours = usePalette();
  const all = useStore(runs)!;
  const { query } = useRoute();
  const extra = query["curve"] ?? null;
  const smoothing = Number(query["smooth"] ?? 0);
  const zoom = parseZoom(query["x"]);
  const split = splitOf(query);
  const usual = USUAL.map((key) => (split ? `eval/${key}` : key));
  const more = [...(split ? usual : []), ...(extra ? [extra] : [])];
  const series = wanted.map((run) => useZoomed(run, useSeries(run, more), zoom, more));
  const names = wanted.map((run) => all.find((one) => one.run === run)?.name ?? run);
  const specs = useMemo(
    () =>
      [...usual, ...(extra ? [extra] : [])].flatMap((key) => {
        const spec = overlaid(key, series, names, colours);
        return spec ? [shaped(spec, { smooth: smoothing, zero: false, log: false })] : [];
      }),
    [...series, smoothing, split, extra, colours],
  );
  const stretches = useMemo(
    () => sides.flatMap(({ steps }, i) => (steps ? [{ steps, colour: curveColour(colours, i) }] : [])),
    [sides, colours],
  );
  const last = Math.max(0, ...series.map((one) => one?.step.at(-1) ?? 0));
  return (
    <section>
      <div class="bar">
        <Smoothing value={smoothing} />
        <Also names={[...new Set(series.flatMap(metricNames))].sort()} chosen={extra} />
      </div>
      <div class="charts">
        {specs.map((spec) => (
          <LineChart
            key={spec.title}
            spec={spec}
            step={last}
            zoom={zoom}
            stretches={stretches}
            onStep={() => undefined}
            onZoom={(range) => patchRoute({ x: range ? `${range[0]}-${range[1]}` : undefined }, true)}
          />
        ))}
      </div>
    </section>
  );
}

function Also({ names, chosen }: { names: string[]; chosen: string | null }) {
  const t = useText();
  return (
    <label>
      {t("alsoShow")}
      <select value={chosen ?? ""} onChange={(event) => patchRoute({ curve: event.currentTarget.value }, true)}>
        <option value="">–</option>
        {names.map((name) => (
          <option key={name} value={name}>
            {name}
          </option>
        ))}
      </select>
    </label>
  );
}

function overlaid(key: string, series: (Series | null)[], names: string[], colours: Palette): LineSpec | null {
  const x = [...new Set(series.flatMap((one) => one?.step ?? []))].sort((a, b) => a - b);
  const curves = series.flatMap((one, i): Curve[] => {
    const values = one?.rollups[key]?.mean ?? one?.metrics[key];
    return one && values
      ? [{ name: names[i]!, values: aligned(x, one.step, values), colour: curveColour(colours, i) }]
      : [];
  });
  return curves.length > 0 ? { title: key, x, curves, bands: [], log: false } : null;
}
