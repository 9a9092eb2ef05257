import assert from "node:assert/strict";
import { test } from "node:test";
import { breakLines, lineOfToken } from "../src/maths/layout";
import { joinTokens } from "../src/maths/units";

const shape = (texts: string[], bytes: (number[] | null)[] | null = null) =>
  joinTokens(texts, bytes).map((unit) => [unit.first, unit.count, unit.text]);

test("half characters are joined by their bytes", () => {
  // 😀 is F0 9F 98 80
  const bytes = [null, [0xf0, 0x9f], [0x98], [0x80], null];
  assert.deepEqual(shape(["a", "\ufffd", "\ufffd", "\ufffd", "b"], bytes), [
    [0, 1, "a"],
    [1, 3, "😀"],
    [4, 1, "b"],
  ]);
});

test("bytes that never make a character stay single tokens", () => {
  assert.deepEqual(shape(["\ufffd", "b"], [[0xf0, 0x9f], null]), [
    [0, 1, "\ufffd"],
    [1, 1, "b"],
  ]);
  assert.deepEqual(shape(["\ufffd", "\ufffd"], [[0xff], [0xff]]), [
    [0, 1, "\ufffd"],
    [1, 1, "\ufffd"],
  ]);
});

test("combining marks, emoji sequences and flags join; letters do not", () => {
  assert.deepEqual(shape(["e", "\u0301", "x"]), [
    [0, 2, "e\u0301"],
    [2, 1, "x"],
  ]);
  assert.deepEqual(shape(["👩", "\u200d", "💻"]), [[0, 3, "👩\u200d💻"]]);
  assert.deepEqual(shape(["👍", "🏽"]), [[0, 2, "👍🏽"]]);
  assert.deepEqual(shape(["🇻", "🇳", "🇫", "🇷"]), [
    [0, 2, "🇻🇳"],
    [2, 2, "🇫🇷"],
  ]);
  assert.deepEqual(shape(["今", "天"]), [
    [0, 1, "今"],
    [1, 1, "天"],
  ]);
});

test("marks without end do not become one unit without end", () => {
  const units = joinTokens(["e", ...Array<string>(1000).fill("\u0301")], null);
  assert.ok(Math.max(...units.map((unit) => unit.count)) <= 16);
  assert.equal(
    units.reduce((sum, unit) => sum + unit.count, 0),
    1001,
  );
});

const tenPerCharacter = (text: string) => 10 * Array.from(text).length;
const lines = (texts: string[], limit: number) =>
  breakLines(joinTokens(texts, null), limit, tenPerCharacter).map((line) =>
    line.fragments.map((f) => f.text).join("|"),
  );

test("lines break before a word, not inside it", () => {
  assert.deepEqual(lines(["The", " app", "oint", "ment"], 120), ["The", " app|oint|ment"]);
  assert.deepEqual(lines(["The", " app", "oint", "ment"], 150), ["The| app|oint|ment"]);
  assert.deepEqual(lines(["abc", "def", "ghi"], 60), ["abc|def", "ghi"]); // one word, longer than the line
  assert.deepEqual(lines(["今天", "天气", "很好"], 40), ["今天|天气", "很好"]);
});

test("newlines end a line and are seen; an empty line stays", () => {
  assert.deepEqual(lines(["a\n\nb", "c"], 100), ["a↵", "↵", "b|c"]);
  assert.deepEqual(lines(["a", "\n"], 100), ["a|↵"]);
});

test("a token wider than the line is cut into parts", () => {
  const found = lines(["x".repeat(30)], 100);
  assert.ok(found.length >= 3);
  assert.equal(found.join(""), "x".repeat(30));
});

test("every token has its line", () => {
  const units = joinTokens(["a\n", "b", "e", "\u0301", "\n", "c"], null);
  const laid = breakLines(units, 1000, tenPerCharacter);
  assert.deepEqual(Array.from(lineOfToken(laid, units, 6)), [0, 1, 1, 1, 1, 2]);
});

test("a paragraph's direction is that of its first strong letter, on all its lines", () => {
  const laid = breakLines(joinTokens(["… مر", "حبا", " hello", "\n", "hi مر"], null), 80, tenPerCharacter);
  assert.deepEqual(
    laid.map((line) => line.direction),
    ["rtl", "rtl", "ltr"],
  );
});

test("what would act is shown by a sign", () => {
  assert.deepEqual(lines(["a\u0000", "\u202e", "\u001b["], 1000), ["a⟨NUL⟩|⟨RLO⟩|⟨ESC⟩["]);
});
