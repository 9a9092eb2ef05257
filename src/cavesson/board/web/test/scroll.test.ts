import assert from "node:assert/strict";
import { test } from "node:test";
import { barAt, barAtRest, barHeight, TALLEST, topAfter } from "../src/maths/scroll";

const small = { whole: 10_000, view: 500 };
const huge = { whole: 280_000_000, view: 500 }; // ten million rows of 28 pixels

test("short lists scroll as they always do", () => {
  assert.equal(barHeight(small), 10_000);
  assert.equal(topAfter(small, 0, 0, 300), 300);
  assert.equal(topAfter(small, 300, 300, 99_999), 9_500);
  assert.equal(barAt(small, 1234), 1234);
});

test("a long list moves pixel by pixel when moved a little", () => {
  assert.equal(barHeight(huge), TALLEST);
  assert.equal(topAfter(huge, 1_000_000, 28_000, 28_100), 1_000_100);
  assert.equal(topAfter(huge, 1_000_000, 28_000, 27_900), 999_900);
});

test("a drag of the bar jumps in proportion, and both ends are reached", () => {
  const most = TALLEST - huge.view;
  assert.equal(topAfter(huge, 0, 0, most), huge.whole - huge.view);
  assert.equal(topAfter(huge, 5_000_000, 90_000, 0), 0);
  assert.equal(topAfter(huge, 0, 0, most / 2), (huge.whole - huge.view) / 2);
});

test("a bar at its end means that the rows are, however small the move was", () => {
  assert.equal(topAfter(huge, 5000, 100, 0), 0);
  assert.equal(topAfter(huge, 1000, TALLEST - 600, TALLEST - huge.view), huge.whole - huge.view);
});

test("the resting bar is at an end only when the rows are", () => {
  assert.equal(barAt(huge, 0), 0);
  assert.equal(barAt(huge, huge.whole - huge.view), TALLEST - huge.view);
  assert.ok(barAt(huge, 10) > 0);
  assert.ok(barAt(huge, huge.whole - huge.view - 10) < TALLEST - huge.view);
});

test("every row can be reached by small moves alone", () => {
  let top = 139_000_000;
  let bar = barAt(huge, top);
  for (let i = 0; i < 1000; i++) {
    const moved = topAfter(huge, top, bar, bar + 100);
    assert.equal(moved, top + 100);
    top = moved;
    bar = barAt(huge, top);
  }
});

test("a resting bar is moved only where it is seen to move, or would come to its end before the rows", () => {
  const middle = 140_000_000;
  const right = barAt(huge, middle);
  const pixel = TALLEST / huge.view; // of its handle
  assert.equal(barAtRest(huge, middle, right + 300), right + 300);
  assert.equal(barAtRest(huge, middle, right + 2 * pixel), right);
  // Near an end: a hundred more pixels down would be the last row.
  const end = TALLEST - huge.view;
  const near = huge.whole - 3 * huge.view;
  assert.equal(barAtRest(huge, near, end - 100), barAt(huge, near));
  assert.equal(barAtRest(huge, 3 * huge.view, 100), barAt(huge, 3 * huge.view));
  assert.equal(barAtRest(small, 1234, 1234), 1234);
});
