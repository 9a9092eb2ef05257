import assert from "node:assert/strict";
import { test } from "node:test";
import { REACH, rowAt } from "../src/maths/ridge";

test("a click just above a ridge's baseline, or below that of the one above, selects it", () => {
  for (const count of [1, 2, 24]) {
    for (let row = 0; row < count; row++) {
      const baseline = (row + REACH) / (count + REACH - 1);
      assert.equal(rowAt(baseline - 1e-6, count, false), row);
      assert.equal(rowAt(baseline - 1 / (count + REACH - 1) + 1e-6, count, false), row);
      assert.equal(rowAt((row + 0.5) / count, count, true), row);
    }
    assert.equal(rowAt(0, count, false), 0);
  }
});
