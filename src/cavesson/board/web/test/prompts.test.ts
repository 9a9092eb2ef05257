import assert from "node:assert/strict";
import { test } from "node:test";
import type { PromptPage } from "../src/api/types";
import { parsePlace, placeText, sideOf } from "../src/maths/sides-of-prompt";

const at = (step: number, sample: number) => ({ step, sample });

const prompt = { first: at(0, 1), last: at(9, 2), best: at(4, 3), worst: at(5, -1) } as PromptPage;

test("a place in the address is a step and a sample", () => {
  assert.deepEqual(parsePlace(placeText(at(12, -3))), at(12, -3));
  for (const text of [undefined, "", "3", "a.b", "1.2.3"]) assert.equal(parsePlace(text), null);
});

test("without a choice, the first response stands against the best", () => {
  assert.deepEqual(sideOf(prompt, "a", undefined), at(0, 1));
  assert.deepEqual(sideOf(prompt, "b", undefined), at(4, 3));
});

test("where the first is the best, or none has a reward, it stands against the last", () => {
  for (const best of [at(0, 1), null]) assert.deepEqual(sideOf({ ...prompt, best }, "b", undefined), at(9, 2));
});

test("an end or a response can be chosen for each side", () => {
  assert.deepEqual(sideOf(prompt, "a", "worst"), at(5, -1));
  assert.deepEqual(sideOf(prompt, "b", "7.8"), at(7, 8));
  assert.equal(sideOf({ ...prompt, worst: null }, "a", "worst"), null);
});
