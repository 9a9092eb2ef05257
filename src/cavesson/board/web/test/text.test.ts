import assert from "node:assert/strict";
import { test } from "node:test";
import { commonBeginning, difference, words } from "../src/maths/diff";
import { beginning, direction, visible } from "../src/maths/text";

test("control characters and direction marks are seen, not obeyed", () => {
  assert.equal(visible("a\u0000b\u001b[31m\u007f"), "a⟨NUL⟩b⟨ESC⟩[31m⟨U+007F⟩");
  assert.equal(visible("\u202eevil\u202c"), "⟨RLO⟩evil⟨PDF⟩");
  assert.equal(visible("a\u200b\u2063b"), "a⟨U+200B⟩⟨U+2063⟩b");
  assert.equal(visible("a\u00ad\u{e0041}b"), "a⟨U+00AD⟩⟨U+E0041⟩b");
  assert.equal(visible("line\n\ttab"), "line\n\ttab");
  assert.equal(visible("\ud800x\udc00"), "⟨D800⟩x⟨DC00⟩");
  assert.equal(visible("😀é中"), "😀é中");
});

test("direction by the first strong character", () => {
  assert.equal(direction("123 مرحبا abc"), "rtl");
  assert.equal(direction("(שלום)"), "rtl");
  assert.equal(direction("abc مرحبا"), "ltr");
  assert.equal(direction("…"), "ltr");
});

test("words of scripts with and without blanks", () => {
  assert.deepEqual(words("The dog, barks."), ["The", " dog", ",", " barks", "."]);
  assert.deepEqual(words("今天 good天"), ["今", "天", " good", "天"]);
  assert.equal(words("  a\n\n b  ").join(""), "  a\n\n b  ");
});

test("a difference puts both texts together again and keeps what is common", () => {
  const pairs = [
    ["the dog was kind", "the old dog was very kind"],
    ["", "new"],
    ["gone", ""],
    ["same", "same"],
    ["a b c d e f", "f e d c b a"],
    ["今天天气很好", "今天心情很好"],
  ] as const;
  for (const [before, after] of pairs) {
    const changes = difference(before, after);
    assert.equal(
      changes
        .filter((c) => c.kind !== "added")
        .map((c) => c.text)
        .join(""),
      before,
    );
    assert.equal(
      changes
        .filter((c) => c.kind !== "removed")
        .map((c) => c.text)
        .join(""),
      after,
    );
  }
  assert.deepEqual(difference("the dog was kind", "the old dog was very kind"), [
    { kind: "same", text: "the" },
    { kind: "added", text: " old" },
    { kind: "same", text: " dog was" },
    { kind: "added", text: " very" },
    { kind: "same", text: " kind" },
  ]);
});

test("the difference is the shortest: its edits are words(a) + words(b) − 2 · longest common subsequence", () => {
  const alphabet = ["a", "b", "c"];
  let state = 7;
  const draw = () => (state = (state * 1103515245 + 12345) % 2147483648) / 2147483648;
  const text = () => Array.from({ length: Math.floor(draw() * 12) }, () => alphabet[Math.floor(draw() * 3)]).join(" ");
  for (let round = 0; round < 200; round++) {
    const [before, after] = [text(), text()];
    const edits = difference(before, after)
      .filter((c) => c.kind !== "same")
      .flatMap((c) => words(c.text));
    const [a, b] = [words(before), words(after)];
    assert.equal(edits.length, a.length + b.length - 2 * commonLength(a, b), `${before} / ${after}`);
  }
});

function commonLength(a: string[], b: string[]): number {
  const table = Array.from({ length: a.length + 1 }, () => Array<number>(b.length + 1).fill(0));
  for (let i = 1; i <= a.length; i++) {
    for (let j = 1; j <= b.length; j++) {
      table[i]![j] = a[i - 1] === b[j - 1] ? table[i - 1]![j - 1]! + 1 : Math.max(table[i - 1]![j]!, table[i]![j - 1]!);
    }
  }
  return table[a.length]![b.length]!;
}

test("a text is cut between characters, and says so", () => {
  assert.equal(beginning("four", 4), "four");
  assert.equal(beginning("five!", 4), "five…");
  assert.equal(beginning("abc🙂d", 4), "abc…"); // the fourth unit is half a character
  assert.equal(beginning("ab🙂cd", 4), "ab🙂…");
});

test("the common beginning of texts ends with a whole word that all have", () => {
  assert.equal(commonBeginning(["First we add. So 4", "First we add. So 45", "First we add. Then 4"]), "First we add.");
  assert.equal(commonBeginning(["same words", "same words"]), "same words");
  assert.equal(commonBeginning(["same", "same words"]), "same");
  assert.equal(commonBeginning(["音乐会很好", "音乐节"]), "音乐");
  assert.equal(commonBeginning(["a", "b"]), "");
  assert.equal(commonBeginning(["alone"]), "");
  assert.equal(commonBeginning([]), "");
});
