import assert from "node:assert/strict";
import { test } from "node:test";
import { fixed, number, percent, signed, whole } from "../src/maths/format";

test("numbers keep four significant digits", () => {
  assert.equal(number(0.529712), "0.5297");
  assert.equal(number(-3.58131), "−3.581");
  assert.equal(number(12), "12");
  assert.equal(number(1234567), "1,234,567");
  assert.equal(number(0), "0");
  assert.equal(number(0.0000123), "1.23e−5");
  assert.equal(number(1e22), "1.00e22");
});

test("what was not measured is a dash, not a zero", () => {
  for (const missing of [null, undefined, NaN, Infinity, "3"]) {
    assert.equal(number(missing), "–");
    assert.equal(fixed(missing, 2), "–");
    assert.equal(whole(missing), "–");
    assert.equal(percent(missing), "–");
  }
});

test("signs, shares and columns", () => {
  assert.equal(signed(0.25), "+0.25");
  assert.equal(signed(-0.25), "−0.25");
  assert.equal(fixed(-0.0001, 2), "0.00");
  assert.equal(fixed(-1.005, 1), "−1.0");
  assert.equal(percent(0.5), "50 %");
  assert.equal(percent(0.031), "3.1 %");
  assert.equal(percent(0), "0 %");
  assert.equal(whole(10000000), "10,000,000");
});
