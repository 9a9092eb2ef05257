import assert from "node:assert/strict";
import { test } from "node:test";
import { scaleOf, strength, tint } from "../src/maths/colour";
import { available, returnToGo, TOKEN_METRICS, tokenValues } from "../src/maths/metrics";

const columns = {
  logprob: [-1, -2, -0.5, 0],
  ref_logprob: [-1, -1, -2.5, 0],
  token_reward: [0.5, -0.25, 2, 0],
  value: [1, 1, 1, 1],
  learned: [1, 1, 1, 0],
};
const values = (key: string, gamma = 1) =>
  Array.from(
    tokenValues(
      TOKEN_METRICS.find((metric) => metric.key === key)!,
      columns,
      gamma,
    ),
  );
const near = (found: number[], expected: number[]) =>
  expected.forEach((value, i) =>
    assert.ok(
      Number.isNaN(value) ? Number.isNaN(found[i]) : Math.abs(found[i]! - value) < 1e-6,
      `${found} ${expected}`,
    ),
  );

test("k1 and k3 per token; padding is not measured", () => {
  near(values("kl_k1"), [0, -1, 2, NaN]);
  // Δ = −1: e^1 − 1 − 1; Δ = 2: e^−2 − 1 + 2
  near(values("kl_k3"), [0, Math.E - 2, Math.exp(-2) + 1, NaN]);
  near(values("prob"), [Math.exp(-1), Math.exp(-2), Math.exp(-0.5), NaN]);
});

test("return to go sums what comes, discounted", () => {
  near(Array.from(returnToGo(columns, 1)), [2.25, 1.75, 2, NaN]);
  near(Array.from(returnToGo(columns, 0.5)), [0.5 + 0.5 * 0.75, -0.25 + 0.5 * 2, 2, NaN]);
  near(Array.from(returnToGo({ token_reward: [1, 2] }, 1)), [3, 2]); // nothing says which are learned: every token counts
  near(values("monte_carlo_error"), [-1.25, -0.75, -1, NaN]);
});

test("a reward that was not measured is not zero", () => {
  near(Array.from(returnToGo({ token_reward: [NaN, NaN] }, 1)), [NaN, NaN]);
  near(Array.from(returnToGo({ token_reward: [1, NaN, 2, 4] }, 0.5)), [NaN, NaN, 4, 4]);
  near(Array.from(returnToGo({ token_reward: [1, 2, NaN] }, 1)), [3, 2, NaN]); // recorded without its padding
});

test("only metrics whose columns were recorded are offered", () => {
  const keys = available(["logprob", "ref_logprob"]).map((metric) => metric.key);
  assert.deepEqual(keys, ["kl_k1", "logprob", "ref_logprob", "prob", "ref_prob", "kl_k3"]);
  assert.deepEqual(available([]), []);
});

const hues = { positive: "#00aa00", negative: "#aa0000", surprise: "#aaaa00", fraction: "#0000aa" };

test("colour strength: zero is clear, the limits are full, beyond them nothing changes", () => {
  const scale = scaleOf("signed", [-1, 0.5, 2, 1]);
  assert.equal(strength(scale, 0), 0);
  assert.equal(strength(scale, 2), 1);
  assert.equal(strength(scale, -1), -0.5);
  assert.equal(strength(scale, 99), 1);
  assert.equal(strength(scaleOf("surprise", [-4, -2, -1, 0]), -2), 0.5);
  assert.equal(strength(scaleOf("fraction", [0.1]), 0.25), 0.25);
});

test("tints take the hue of their side; nothing measured, no tint", () => {
  const scale = scaleOf("signed", [-1, 1]);
  assert.equal(tint(scale, 1, hues), "#00aa00b8"); // b8 = 184, the strongest
  assert.equal(tint(scale, -1, hues), "#aa0000b8");
  assert.equal(tint(scale, NaN, hues), null);
});
