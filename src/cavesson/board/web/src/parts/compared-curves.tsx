/** The curves of several runs, laid over each other step by step. */

import { useMemo } from "preact/hooks";
import type { Series } from "../api/types";
import { LineChart } from "../charts/line-chart";
import { type Curve, curveColour, type LineSpec } from "../charts/line-spec";
import { type Palette, usePalette } from "../charts/palette";
import { useText } from "../i18n";
import { AXES, type Axis, laidOver, placesAlong } from "../maths/along";
import type { Side } from "../maths/sides";
import { ChooseAxis, useAxisNames } from "./choose-axis";
import { Smoothing } from "./smoothing";
import { NoteList } from "./notes";
import { runs } from "../state/board";
import { flagsOf, useNotes } from "../state/notes";
import { alignedNames, useSeries, useZoomed } from "../state/series";
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
  const axis = AXES.find((one) => one === query["axis"]) ?? "step";
  const zoom = axis === "step" ? parseZoom(query["x"]) : null;
  const split = splitOf(query);
  const usual = USUAL.map((key) => (split ? `eval/${key}` : key));
  const more = [...(split ? usual : []), ...(extra ? [extra] : [])];
  const units = useAxisNames();
  const series = wanted.map((run) => useZoomed(run, useSeries(run, more), zoom, more));
  const notes = wanted.map((run) => useNotes(run));
  const names = wanted.map((run) => all.find((one) => one.run === run)?.name ?? run);
  const specs = useMemo(
    () =>
      [...usual, ...(extra ? [extra] : [])].flatMap((key) => {
        const spec = overlaid(key, axis, units[axis], series, names, colours);
        return spec ? [shaped(spec, { smooth: smoothing, zero: false, log: false })] : [];
      }),
    [...series, smoothing, split, extra, axis, units.step, colours],
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
        <Also names={[...new Set(series.flatMap(alignedNames))].sort()} chosen={extra} />
        <ChooseAxis axis={axis} axes={AXES} series={series} />
      </div>
      <div class="charts">
        {specs.map((spec) => (
          <LineChart
            key={spec.title}
            spec={spec}
            step={axis === "step" ? last : (spec.x.at(-1) ?? 0)}
            zoom={zoom}
            flags={
              axis === "step"
                ? notes.flatMap((own, i) => flagsOf(own, spec.curves, curveColour(colours, i), names[i]!))
                : []
            }
            stretches={axis === "step" ? stretches : []}
            onStep={() => undefined}
            onZoom={(range) =>
              axis === "step" && patchRoute({ x: range ? `${range[0]}-${range[1]}` : undefined }, true)
            }
          />
        ))}
      </div>
      <NoteList notes={notes.flatMap((own, i) => own.map((note) => ({ ...note, run: names[i]! })))} />
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

/** A curve that a trainer calls otherwise has that name in the legend. */
function overlaid(
  key: string,
  axis: Axis,
  unit: string,
  series: (Series | null)[],
  names: string[],
  colours: Palette,
): LineSpec | null {
  const found = series.flatMap((one, i) => {
    const values = one?.rollups[key]?.mean ?? one?.metrics[key];
    if (!one || !values) return [];
    const called = one.names?.called?.[key];
    const name = called === undefined ? names[i]! : `${names[i]} · ${called}`;
    return [{ name, colour: curveColour(colours, i), places: placesAlong(one, axis), values }];
  });
  const { x, values } = laidOver(found);
  const curves = found.flatMap(({ name, colour }, i): Curve[] =>
    values[i]!.some((value) => value !== null) ? [{ name, key, colour, values: values[i]! }] : [],
  );
  if (curves.length === 0) return null;
  return { title: key, x, curves, bands: [], log: false, ...(axis === "step" ? {} : { unit }) };
}
