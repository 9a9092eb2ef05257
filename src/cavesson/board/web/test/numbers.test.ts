import assert from "node:assert/strict";
import { test } from "node:test";
import { apart, fromZero, limits, quantile, smooth, thinned, ticks } from "../src/maths/numbers";

test("quantiles are interpolated between neighbours", () => {
  assert.equal(quantile([1, 2, 3, 4], 0.5), 2.5);
  assert.equal(quantile([1, 2, 3, 4], 0.25), 1.75); // place 3 · 0.25 = 0.75 between 1 and 2
  assert.equal(quantile([7], 0.9), 7);
  assert.ok(Number.isNaN(quantile([], 0.5)));
});

test("one outlier does not move colour limits", () => {
  const calm = Array.from({ length: 50 }, (_, i) => i / 10); // 0 to 4.9
  assert.deepEqual(limits(calm, false), [0, 4.9]);
  assert.deepEqual(limits([...calm, 1e6], false), [0, 4.9]);
  assert.deepEqual(limits([...calm, -30, -30], false), [0, 4.9]);
});

test("signed limits are symmetric", () => {
  assert.deepEqual(limits([-1, 0.5, 2, 1], true), [-2, 2]);
  assert.deepEqual(limits([-1, 0.5, -2, 1, 1.5, 0.2, 0.9, -500], true), [-2, 2]);
});

test("sparse values keep their few numbers visible", () => {
  assert.deepEqual(limits([0, 0, 0, 0, 0, 0, 0, 0, 0, 0.7], true), [-0.7, 0.7]);
  assert.deepEqual(limits([0, 0, 0, 0], true), [-1, 1]);
});

test("what was not measured takes no part", () => {
  assert.deepEqual(limits([NaN, null, 1, 3], false), [1, 3]);
  assert.deepEqual(limits([], false), [0, 1]);
});

test("smoothing: weights (1 − w) w^k, divided by their sum", () => {
  // w = 0.5: second = (0.25 · 1 + 0.5 · 4) / 0.75 = 3; third = (0.125 · 1 + 0.25 · 4 + 0.5 · 8) / 0.875
  assert.deepEqual(smooth([1, 4, 8], 0.5), [1, 3, 5.125 / 0.875]);
  assert.deepEqual(smooth([1, null, 4], 0.5), [1, null, 3]);
  assert.deepEqual(smooth([1, null, 4], 0), [1, null, 4]);
});

test("from zero: the first measured value is subtracted", () => {
  assert.deepEqual(fromZero([null, 2, 5, null, 1]), [null, 0, 3, null, -1]);
});

test("ticks are at round numbers", () => {
  assert.deepEqual(ticks(0, 10, 5), [0, 2, 4, 6, 8, 10]);
  assert.deepEqual(ticks(-1.2, 1.1, 4), [-1, 0, 1]);
  assert.deepEqual(ticks(3, 3, 4), [3]);
});

test("a thinned curve keeps each pixel's lowest and highest value, in order", () => {
  assert.deepEqual(thinned([5, 1, 9, 2, 2, 2], 2), [1, 2, 3]); // of 5 1 9 the 1 and the 9; of 2 2 2 one
  assert.deepEqual(thinned([NaN, 3, NaN, NaN], 2), [1]);
  assert.deepEqual(thinned([4, 5, 6], 100), [0, 1, 2]);
});

test("labels keep apart and inside", () => {
  assert.deepEqual(apart([10, 50, 12], 14, 100), [10, 50, 24]);
  assert.deepEqual(apart([98, 99, 10], 14, 100), [86, 100, 10]);
});
