import assert from "node:assert/strict";
import { test } from "node:test";
import type { Rollup, Series } from "../src/api/types";
import { aligned, appended, completed, nearestStep, neighbour, placeOf, portions } from "../src/maths/series";
import { formatSides, parseSides, usualSides } from "../src/maths/sides";

const rollup = (mean: (number | null)[]) => ({ mean }) as unknown as Rollup;
const known: Series = {
  step: [0, 1, 2],
  metrics: { loss: [5, 4, null] },
  rollups: { reward: rollup([0.1, 0.2, 0.3]) },
};

test("new steps are appended; the newest known one is replaced, as its metrics came late", () => {
  const grown = appended(known, {
    step: [2, 3],
    metrics: { loss: [3, 2], kl: [1, 2] },
    rollups: { reward: rollup([0.3, 0.4]) },
  });
  assert.deepEqual(grown.step, [0, 1, 2, 3]);
  assert.deepEqual(grown.metrics, { loss: [5, 4, 3, 2], kl: [null, null, 1, 2] });
  assert.deepEqual(grown.rollups["reward"]!.mean, [0.1, 0.2, 0.3, 0.4]);
});

test("names go in portions, each at most 10,000 characters with its commas, none lost and in their order", () => {
  const names = Array.from({ length: 300 }, (_, i) => `metric/${i}`.padEnd(99, "x")); // 100 characters with the comma
  const lists = portions(names);
  assert.deepEqual(
    lists.map((list) => list.length),
    [100, 100, 100],
  );
  assert.deepEqual(lists.flat(), names);
  assert.deepEqual(portions([]), [[]]);
  assert.deepEqual(portions(["x".repeat(20_000)]), [["x".repeat(20_000)]]);
});

test("nothing new changes nothing", () => {
  assert.deepEqual(appended(known, { step: [], metrics: {}, rollups: {} }).metrics, { loss: [5, 4, null] });
});

test("further curves are added; those that were asked for earlier end earlier", () => {
  const more: Series = { step: [0, 1, 2, 3], metrics: { kl: [1, 2, 3, 4] }, rollups: {} };
  for (const joined of [completed(known, more), completed(more, known)]) {
    assert.deepEqual(joined.step, [0, 1, 2, 3]);
    assert.deepEqual(joined.metrics, { loss: [5, 4, null, null], kl: [1, 2, 3, 4] });
    assert.deepEqual(joined.rollups["reward"]!.mean, [0.1, 0.2, 0.3, null]);
  }
});

test("runs of different steps are laid over each other by step", () => {
  assert.deepEqual(aligned([0, 5, 10, 15], [5, 15, 20], [1, 2, 3]), [null, 1, null, 2]);
});

test("sides are written and read as in the address", () => {
  const sides = parseSides("a@0-9,a@90-99,sweep/b=1");
  assert.deepEqual(sides, [
    { run: "a", steps: [0, 9] },
    { run: "a", steps: [90, 99] },
    { run: "sweep/b=1", steps: null },
  ]);
  assert.equal(formatSides(sides), "a@0-9,a@90-99,sweep/b=1");
  assert.deepEqual(parseSides("x@3,@1-2,y@-2"), []);
});

test("by default the first two runs, or the ends of one", () => {
  const run = (name: string) => ({ run: name, steps: [0, 99] as [number, number] });
  assert.equal(formatSides(usualSides([run("a"), run("b"), run("c")])), "a,b");
  assert.equal(formatSides(usualSides([run("a")])), "a@0-9,a@90-99");
});

test("a step is found within points that stand for several", () => {
  const points = [
    [0, 4],
    [5, 9],
    [20, 24],
  ] as const;
  assert.equal(placeOf([0, 5, 20], 7), 1);
  assert.equal(placeOf([0, 5, 20], 19), 1);
  assert.equal(placeOf([5, 20], 1), 0);
  assert.equal(placeOf([], 3), 0);
  const first = Array.from({ length: 100 }, (_, i) => 3 * i);
  for (let step = 0; step < 310; step++) assert.equal(placeOf(first, step), Math.min(99, Math.floor(step / 3)));
  assert.equal(nearestStep(points, 6.6), 7);
  assert.equal(nearestStep(points, 11), 9);
  assert.equal(nearestStep(points, 17), 20);
  assert.equal(nearestStep(points, 99), 24);
  assert.equal(neighbour(points, 6, 1), 7);
  assert.equal(neighbour(points, 9, 1), 20);
  assert.equal(neighbour(points, 20, -1), 9);
  assert.equal(neighbour(points, 24, 1), 24);
  assert.equal(neighbour(points, 0, -1), 0);
  assert.equal(neighbour(points, 7, Infinity), 24);
  assert.equal(neighbour(points, 7, -Infinity), 0);
});
