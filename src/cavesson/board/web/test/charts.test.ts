import assert from "node:assert/strict";
import { test } from "node:test";
import type { Rollup, Series } from "../src/api/types";
import type { Palette } from "../src/charts/palette";
import { leaving, lineSvg, windowOf } from "../src/charts/line-spec";
import { en } from "../src/i18n/en";
import { translate } from "../src/i18n/translate";
import { along } from "../src/maths/along";
import { heightOf } from "../src/maths/height";
import { constant, divided } from "../src/maths/moving";
import type { Maybe } from "../src/maths/numbers";
import { isFirst } from "../src/state/first";
import { arranged, type Drawing, machineCharts, mainCharts } from "../src/views/overview-charts";

/** Numbers from 0 to 1, the same at each run of the tests (Park and Miller 1988). */
function uniform(seed: number): () => number {
  let state = seed;
  return () => (state = (state * 48271) % 2147483647) / 2147483647;
}

const rising = (steps: number, from = 0): number[] => Array.from({ length: steps }, (_, i) => from + i);
const rollup = (mean: Maybe[]): Rollup =>
  ({ mean, q05: mean, q25: mean, q75: mean, q95: mean, sd: mean }) as unknown as Rollup;

const usual = { smooth: 0, zero: false, log: false, band: "none" } as const;
const colours = new Proxy({}, { get: () => "#000000" }) as Palette;
const drawing = (metrics: Series["metrics"], rollups: Series["rollups"] = {}): Drawing => {
  const step = rising(6);
  const series: Series = { step, metrics, rollups };
  const t: Drawing["t"] = (key, values) => translate(en, key, values);
  return { series, shaping: usual, colours, t, along: along(series, "step") };
};
const titles = (charts: { spec: { title: string } }[]): string[] => charts.map(({ spec }) => spec.title);

test("what decides whether a run learns comes before the figures of the update", () => {
  const metrics = Object.fromEntries(
    ["policy/clip_fraction", "policy/ratio", "tool/search/errors", "group/zero_std", "finish/length"].map((name) => [
      name,
      rising(6),
    ]),
  );
  const rollups = {
    reward: rollup(rising(6)),
    kl_k1: rollup(rising(6)),
    entropy: rollup(rising(6)),
    length: rollup(rising(6)),
  };
  assert.deepEqual(titles(mainCharts(drawing(metrics, rollups))), [
    en.reward,
    en.truncated,
    en.zeroVariance,
    en.toolErrors,
    en.kl,
    en.entropy,
    en.length,
    en.clip,
    en.ratio,
  ]);
});

test("what was never measured has no chart, and what never changes stands apart with its number", () => {
  const metrics = { "policy/ratio": [1, 1.0004, 0.9998, 1, 1, 1], "policy/clip_fraction": [0, 0, 0, 0, 0, 0.1] };
  const missing = { "optim/grad_norm": Array<null>(6).fill(null) };
  const charts = mainCharts(drawing({ ...metrics, ...missing }, { reward: rollup(Array<number>(6).fill(0)) }));
  const [shown, unchanged] = arranged(charts, charts);
  assert.deepEqual(titles(shown), [en.reward, en.clip]); // a reward that stays at 0 is the first thing to see
  assert.deepEqual(titles(unchanged), [en.ratio]);
  assert.equal(constant(metrics["policy/ratio"]), 1);
});

test("a chart that is flat in the steps zoomed in on keeps its place", () => {
  const whole = mainCharts(drawing({ "kl/coef": [1, 1, 1, 1, 2, 2] }));
  const zoomed = mainCharts(drawing({ "kl/coef": [1, 1, 1, 1, 1, 1] }));
  assert.deepEqual(arranged(zoomed, whole), [zoomed, []]);
});

test("a curve rests if five points or more move by less than a thousandth of its size", () => {
  assert.equal(constant([2, 2, 2, 2, null, 2.001]), 2.001);
  assert.equal(constant([2, 2, 2, 2, null, 2.01]), null);
  assert.equal(constant([-2, -2, -2, -2, -2.001]), -2.001);
  assert.equal(constant([0, 0, 0, 0, 1e-9]), null);
  assert.equal(constant([5, 5, null, 5, 5]), null);
  const [rests, moves] = [Array<number>(5).fill(1), rising(5)];
  assert.deepEqual(
    divided([rests, moves, rests], (values) => [values]),
    [[moves], [rests, rests]],
  );
});

test("every name that the charts draw is asked for, but for what the server offers to count", () => {
  const read = new Set<string>();
  const listening = <T>(value: T): Record<string, T> =>
    new Proxy({} as Record<string, T>, { get: (_, name) => (read.add(String(name)), value) });
  const known = drawing({});
  for (const of of [undefined, rollup(rising(6))]) {
    const rollups = listening(of) as Series["rollups"];
    const metrics = listening(of?.mean) as Series["metrics"];
    const all = { ...known, series: { ...known.series, metrics, rollups } };
    mainCharts(all);
    machineCharts(all);
  }
  assert.ok(read.size > 25);
  assert.deepEqual(
    [...read].filter((name) => !isFirst(name) && !name.startsWith("rows/")),
    [],
  );
});

test("outliers are left out of the axis, counted, and the furthest named", () => {
  const calm = rising(40).map((i) => Math.sin(i)); // within ±1
  assert.deepEqual(heightOf([[-2000, -30, ...calm]])?.beyond, { count: 2, lowest: -2000, highest: null });
  assert.deepEqual(heightOf([[-2000, 1e6, ...calm]])?.beyond, { count: 2, lowest: -2000, highest: 1e6 });
  assert.equal(heightOf([calm])?.beyond, null);
  assert.equal(heightOf([[null, NaN]]), null);
});

test("values that many share are not outliers: two levels, few points of either, and curves of different sizes", () => {
  const calm = rising(40).map((i) => Math.sin(i));
  assert.equal(heightOf([[...calm, ...calm.map((value) => value / 4 + 50)]])?.beyond, null);
  assert.equal(heightOf([[...Array<number>(30).fill(0), 1, 0, 0]])?.beyond, null); // a single event is what there is to see
  assert.equal(heightOf([calm, calm.map((value) => 500 * value)])?.beyond, null);
  assert.equal(heightOf([[...calm, 3]])?.beyond, null); // far, but the others keep more than a fifth of the axis
});

test("robust ranges, of random curves: counted exactly, inside the whole, and moving with the values", () => {
  const random = uniform(7);
  let clipped = 0;
  for (let round = 0; round < 300; round++) {
    const spread = 10 ** Math.floor(6 * random());
    const curve = Array.from({ length: 5 + Math.floor(60 * random()) }, () =>
      random() < 0.08 ? spread * (random() - 0.5) : random(),
    );
    const { usual, whole, beyond } = heightOf([curve])!;
    const outside = curve.filter((value) => value < usual[0] || value > usual[1]);
    assert.equal(beyond?.count ?? 0, outside.length);
    const [low, high] = [Math.min(...curve), Math.max(...curve)];
    // 6 % of room on each side: the whole is 1.12 times as high as the values.
    assert.ok(whole[0] < low && whole[1] > high && Math.abs(whole[1] - whole[0] - 1.12 * (high - low)) < 1e-6 * high);
    const [below, above] = [curve.filter((value) => value < usual[0]), curve.filter((value) => value > usual[1])];
    assert.equal(beyond?.lowest ?? null, below.length > 0 ? Math.min(...below) : null);
    assert.equal(beyond?.highest ?? null, above.length > 0 ? Math.max(...above) : null);
    if (beyond) {
      clipped++;
      assert.ok(usual[1] - usual[0] < (whole[1] - whole[0]) / 5 && outside.length <= curve.length / 5);
    }
    // Powers of two and signs are exact in floating point.
    const { usual: moved, beyond: others } = heightOf([curve.toReversed().map((value) => -8 * value)])!;
    for (const [i, end] of [-8 * usual[1], -8 * usual[0]].entries())
      assert.ok(Math.abs(moved[i]! - end) < 1e-9 * spread);
    assert.equal(others?.count, beyond?.count);
  }
  assert.ok(clipped > 20 && clipped < 280);
});

test("where curves leave the axis there are arrows, also in the picture, unless the full range is asked for", () => {
  const values = [-2000, ...rising(20).map((i) => Math.cos(i)), 900];
  const spec = { title: "x", x: rising(22), bands: [], log: false, curves: [{ name: "a", values, colour: "#123456" }] };
  const window = windowOf(spec, null, false);
  assert.ok(window.y[0] > -2 && window.y[1] < 2);
  assert.deepEqual(
    [...leaving(spec, window)].map(([place, end]) => [place, end]),
    [
      [0, -1],
      [21, 1],
    ],
  );
  const arrows = (svg: string): number => svg.split("<polygon").length - 1;
  assert.equal(arrows(lineSvg(spec, window, "2 beyond", colours)[0]), 2);
  const full = windowOf(spec, null, true);
  assert.ok(full.y[0] < -2000 && full.y[1] > 900 && full.beyond?.count === 2);
  assert.equal(arrows(lineSvg(spec, full, "", colours)[0]), 0);
  // Zoomed in on where there is no outlier, nothing is beyond the axis.
  assert.equal(windowOf(spec, [1, 20], false).beyond, null);
});

test("a logarithmic axis shows every value that has a place on it", () => {
  const values = [0, 1e-6, ...rising(20, 1), 1e6];
  const spec = { title: "x", x: rising(23), bands: [], log: true, curves: [{ name: "a", values, colour: "#123456" }] };
  const { y, beyond } = windowOf(spec, null, false);
  assert.equal(beyond, null);
  assert.ok(y[0] < -6 && y[0] > -7 && y[1] > 6 && y[1] < 7); // powers of ten
});
