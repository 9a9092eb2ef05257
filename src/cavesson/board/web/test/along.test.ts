import assert from "node:assert/strict";
import { test } from "node:test";
import type { Rollup, Series } from "../src/api/types";
import { along, laidOver, placesAlong } from "../src/maths/along";

const series = {
  step: [0, 1, 2],
  steps: [
    [0, 0],
    [1, 2],
    [3, 3],
  ],
  metrics: { "time/step": [60, 30, 90], "kl/objective": [0, 0.5, null] },
  rollups: { length: { count: [4, 8, null], mean: [10, 5, null] } as unknown as Rollup },
} as unknown as Series;

test("a run is laid along its steps, the tokens and minutes up to each, or its KL", () => {
  assert.deepEqual(placesAlong(series, "step"), [0, 1, 2]);
  assert.deepEqual(placesAlong(series, "tokens"), [40, 80, null]);
  // Point 1 stands for two steps of half a minute each.
  assert.deepEqual(placesAlong(series, "time"), [1, 2, 3.5]);
  assert.deepEqual(placesAlong(series, "kl"), [0, 0.5, null]);
  assert.deepEqual(placesAlong({ ...series, metrics: {}, rollups: {} }, "kl"), [null, null, null]);
});

test("curves with different places are laid over each other in ascending order", () => {
  const { x, values } = laidOver([
    { places: [0, 40, null], values: [1, 2, 3] },
    { places: [20, 0], values: [5, 4] },
  ]);
  assert.deepEqual(x, [0, 20, 40]);
  assert.deepEqual(values, [
    [1, null, 2],
    [4, 5, null],
  ]);
});

test("examples are laid along the tokens that training read", () => {
  const read = { step: [0, 1], metrics: { "data/tokens": [100, 50] }, rollups: {} } as Series;
  assert.deepEqual(placesAlong(read, "tokens"), [100, 150]);
});

test("every step has a place along an axis, and every place a step", () => {
  const tokens = along(series, "tokens");
  assert.equal(tokens.at(-1), 0); // nothing was spent before
  assert.equal(tokens.at(0), 40);
  assert.equal(tokens.at(1), 80);
  assert.equal(tokens.at(0.5), 60); // half way on the line between 40 and 80
  assert.equal(tokens.at(2), 120); // not measured there: the line goes on
  const time = along(series, "time");
  for (const step of [-1, 0, 0.25, 1, 2, 3.5]) assert.ok(Math.abs(time.stepAt(time.at(step)) - step) < 1e-9);
  assert.equal(along(series, "step").at(7), 7);
  assert.equal(along({ ...series, rollups: {} }, "tokens").at(7), 7); // without tokens, the steps
});

test("steps that cost nothing share a place", () => {
  const counts = { count: [1, 0, 1], mean: [10, 0, 10] } as unknown as Rollup;
  const { at, stepAt } = along({ step: [0, 1, 2], metrics: {}, rollups: { length: counts } }, "tokens");
  assert.deepEqual([0, 1, 2].map(at), [10, 10, 20]);
  assert.equal(stepAt(10), 1);
  assert.equal(stepAt(20), 2);
});
