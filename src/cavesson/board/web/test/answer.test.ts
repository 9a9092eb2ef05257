import assert from "node:assert/strict";
import { test } from "node:test";
import {
  type Answer,
  barsOf,
  type Choice,
  curvesOf,
  drawnAs,
  nameInSql,
  rolloutOf,
  sortedBy,
} from "../src/maths/answer";

const FREE: Choice = { kind: undefined, across: undefined, value: undefined };
const answer = (columns: string[], types: string[], rows: unknown[][]): Answer => ({ columns, types, rows });
const CURVES = answer(
  ["step", "a", "b"],
  ["int32", "double", "double"],
  [
    [2, 5, 6],
    [0, 1, null],
    [1, 3, 4],
  ],
);

test("a number that never repeats itself and other numbers are lines", () => {
  const drawn = drawnAs(CURVES, FREE);
  assert.deepEqual(drawn, { kind: "line", across: 0, by: null, values: [1, 2] });
  assert.deepEqual(curvesOf(CURVES, drawn), {
    x: [0, 1, 2],
    curves: [
      { name: "a", values: [1, 3, 5] },
      { name: "b", values: [null, 4, 6] },
    ],
    total: 2,
  });
  assert.deepEqual(CURVES.rows[0], [2, 5, 6], "the answer keeps its order");
});

test("a text that tells repeated numbers apart gives a curve for each text", () => {
  const rows = [
    [0, "x", 1],
    [0, "y", 2],
    [1, "x", 3],
    [2, "y", 4],
  ];
  const parts = answer(["step", "part", "score"], ["int32", "string", "double"], rows);
  const drawn = drawnAs(parts, FREE);
  assert.deepEqual(drawn, { kind: "line", across: 0, by: 1, values: [2] });
  assert.deepEqual(curvesOf(parts, drawn), {
    x: [0, 1, 2],
    curves: [
      { name: "x", values: [1, 3, null] },
      { name: "y", values: [2, null, 4] },
    ],
    total: 2,
  });
});

test("a text and a number are bars", () => {
  const ends = answer(
    ["finish", "n", "reward"],
    ["string", "int64", "double"],
    [
      ["eos", 3, 0.5],
      [null, 1, null],
    ],
  );
  const drawn = drawnAs(ends, FREE);
  assert.deepEqual(drawn, { kind: "bars", across: 0, by: null, values: [1] });
  assert.deepEqual(barsOf(ends, drawn), { names: ["eos", "–"], values: [{ name: "n", numbers: [3, 1] }] });
});

test("a list of rollouts, texts alone and a single line are no chart", () => {
  const rollouts = [
    [0, 1, 5],
    [0, 2, 6],
  ];
  assert.equal(
    drawnAs(answer(["step", "sample", "reward"], ["int32", "int32", "double"], rollouts), FREE).kind,
    "none",
  );
  assert.equal(
    drawnAs(
      answer(
        ["a", "b"],
        ["string", "string"],
        [
          ["x", "y"],
          ["z", "y"],
        ],
      ),
      FREE,
    ).kind,
    "none",
  );
  assert.equal(drawnAs(answer(["a", "b"], ["int32", "int32"], [[1, 2]]), FREE).kind, "none");
  assert.equal(drawnAs(answer([], [], []), FREE).kind, "none");
});

test("texts that are all different are no curves", () => {
  const rows = [
    [0, 1, "x", 5],
    [0, 2, "y", 6],
    [1, 1, "z", 7],
    [1, 2, "w", 8],
  ];
  const best = answer(["step", "sample", "response", "reward"], ["int32", "int32", "string", "double"], rows);
  assert.equal(drawnAs(best, FREE).kind, "none");
});

test("the reader's choice goes first", () => {
  assert.deepEqual(drawnAs(CURVES, { ...FREE, value: 2 }).values, [2]);
  assert.deepEqual(drawnAs(CURVES, { ...FREE, across: 1 }), { kind: "line", across: 1, by: null, values: [0, 2] });
  assert.deepEqual(drawnAs(CURVES, { ...FREE, kind: "bars" }).values, [1]);
  assert.equal(drawnAs(CURVES, { ...FREE, kind: "none" }).kind, "none");
});

test("lines are sorted by numbers as numbers, and what is missing comes last", () => {
  const rows = [
    [10, "b"],
    [9, null],
    [null, "a"],
  ];
  assert.deepEqual(sortedBy(rows, "1"), [
    [9, null],
    [10, "b"],
    [null, "a"],
  ]);
  assert.deepEqual(sortedBy(rows, "-1"), [
    [10, "b"],
    [9, null],
    [null, "a"],
  ]);
  assert.deepEqual(sortedBy(rows, "-2"), [
    [10, "b"],
    [null, "a"],
    [9, null],
  ]);
  assert.equal(sortedBy(rows, undefined), rows);
});

test("a line is a rollout if it has both of its keys", () => {
  const keys = answer(["reward", "sample", "step"], [], []);
  assert.deepEqual(rolloutOf(keys, [0.5, 3, 7]), { step: 7, sample: 3 });
  assert.equal(rolloutOf(keys, [0.5, 3, null]), null);
  assert.equal(rolloutOf(answer(["step"], [], []), [7]), null);
});

test("names are quoted where SQL needs it", () => {
  assert.equal(nameInSql("reward"), "reward");
  assert.equal(nameInSql("group"), '"group"');
  assert.equal(nameInSql('kl/"x"'), '"kl/""x"""');
});
