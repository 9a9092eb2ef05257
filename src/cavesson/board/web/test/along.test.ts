import assert from "node:assert/strict";
import { test } from "node:test";
import type { Rollup, Series } from "../src/api/types";
import { laidOver, placesAlong } from "../src/maths/along";

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
