import assert from "node:assert/strict";
import { test } from "node:test";
import type { Pattern } from "../src/api/types";
import { csv } from "../src/maths/csv";
import { lines } from "../src/maths/patterns";
import { compared, found, groupsOf } from "../src/maths/settings";

const INFO = {
  algorithm: "grpo",
  versions: { cavesson: "1.0", torch: "2.9" },
  config: {
    steps: 20,
    optimizer: { learning_rate: 1e-6, betas: [0.9, 0.95] },
    rewards: [{ use: "length", weight: 1 }, { use: "a.py:f" }],
    cleaning: {},
    resume: null,
  },
};

test("settings come first, by their groups, with the names that a recipe has", () => {
  assert.deepEqual(
    groupsOf(INFO).map(({ name, settings }) => [name, ...settings.map((one) => `${one.name}=${one.value}`)]),
    [
      ["", "steps=20", "resume=null"],
      ["optimizer", "optimizer.learning_rate=0.000001", "optimizer.betas=[0.9,0.95]"],
      ["rewards", "rewards[0].use=length", "rewards[0].weight=1", "rewards[1].use=a.py:f"],
      ["cleaning", "cleaning={}"],
      ["", "algorithm=grpo"],
      ["versions", "versions.cavesson=1.0", "versions.torch=2.9"],
    ],
  );
  for (const nothing of [null, {}, [], "x", { config: 3 }]) assert.deepEqual(groupsOf(nothing), []);
});

test("a search looks at names and values, in any case", () => {
  const names = (text: string): string[] =>
    found(groupsOf(INFO), text).flatMap(({ settings }) => settings.map(({ name }) => name));
  assert.deepEqual(names("LEARN"), ["optimizer.learning_rate"]);
  assert.deepEqual(names("a.py"), ["rewards[1].use"]);
  assert.equal(names(" ").length, 11);
  assert.deepEqual(names("nothing of this"), []);
});

test("settings of several runs beside each other; what one lacks differs", () => {
  const other = { config: { steps: 20, kl: { coef: 0.1 } } };
  const differing = compared([INFO, other]).filter(({ same }) => !same);
  assert.equal(differing.length, 11);
  assert.deepEqual(differing.at(-1), { name: "kl.coef", values: [null, "0.1"], same: false });
  assert.equal(
    compared([INFO, INFO, INFO]).every(({ same }) => same),
    true,
  );
});

test("what is recorded beside the settings does not hide a setting of the same name", () => {
  const infos = [{ steps: 40, config: { steps: null } }, { steps: 40, config: { steps: 40 } }, { steps: 7 }];
  assert.deepEqual(compared(infos), [
    { name: "steps", values: ["null", "40", null], same: false },
    { name: "steps (run.json)", values: ["40", "40", "7"], same: false },
  ]);
});

const pattern = (text: string, ...share: (number | null)[]): Pattern => ({
  ...{
    text,
    share,
    kind: "word",
    first: 0,
    last: 0,
    growth: 0,
    reward_effect: 0,
    reward_effect_sd: 0,
    reward_effect_interval: null,
    rows: 1,
  },
});

test("patterns whose curves lie on top of each other share a line", () => {
  const [a, same, near, b, gap] = [
    pattern("a", 0.1, 0.5),
    pattern("a b", 0.1, 0.5),
    pattern("a c", 0.1005, 0.5),
    pattern("b", 0.1, 0.4),
    pattern("gap", null, 0.5),
  ];
  assert.deepEqual(lines([a!, b!, same!, gap!, near!], 6), [[a, same, near], [b], [gap]]);
  assert.deepEqual(lines([a!, b!, gap!, same!], 2), [[a, same], [b]]);
  assert.deepEqual(lines([], 6), []);
});

test("in CSV texts that look like formulas are quoted, numbers are not", () => {
  assert.equal(
    csv([
      ["=1+1", "-x", "@a", "+1", "\tq"],
      [-1.5, 0, null, "a=b", "−1"],
    ]),
    "'=1+1,'-x,'@a,'+1,'\tq\r\n-1.5,0,,a=b,−1\r\n",
  );
});
