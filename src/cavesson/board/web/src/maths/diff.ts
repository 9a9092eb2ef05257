/** Word-wise difference of two texts (Myers 1986, "An O(ND) difference algorithm"). */

interface Change {
  kind: "same" | "removed" | "added";
  text: string;
}

/** Beyond this many differing words the texts have nothing in common worth showing. */
const MAX_EDITS = 1200;

const ALONE = String.raw`[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}]`;
const LETTER = String.raw`[\p{L}\p{N}\p{M}_]`;
const WORD = new RegExp(
  // a character of a script without blanks, a word before such a character, a word, another sign, blanks at the end
  [`\\s*${ALONE}`, `\\s*${LETTER}+?(?=${ALONE})`, `\\s*${LETTER}+`, `\\s*[^\\s\\p{L}\\p{N}\\p{M}_]`, `\\s+`].join("|"),
  "gu",
);

/** Words with the blank before them, single signs, and each character of scripts without blanks. */
export function words(text: string): string[] {
  return text.match(WORD) ?? [];
}

export function difference(before: string, after: string): Change[] {
  const a = words(before);
  const b = words(after);
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const middle = edits(a.slice(start, a.length - end), b.slice(start, b.length - end));
  return merged([
    { kind: "same", text: a.slice(0, start).join("") },
    ...middle,
    { kind: "same", text: a.slice(a.length - end).join("") },
  ]);
}

/** The longest beginning, in whole words, that all of several texts have in common; of a single text, nothing. */
export function commonBeginning(texts: readonly string[]): string {
  if (texts.length < 2) return "";
  const [first = [], ...others] = texts.map(words);
  const differs = first.findIndex((word, i) => others.some((other) => other[i] !== word));
  return first.slice(0, differs < 0 ? first.length : differs).join("");
}

function edits(a: string[], b: string[]): Change[] {
  const trace = search(a, b);
  if (!trace)
    return [
      { kind: "removed", text: a.join("") },
      { kind: "added", text: b.join("") },
    ];
  const found: Change[] = [];
  let x = a.length;
  let y = b.length;
  for (let d = trace.length - 1; d >= 0; d--) {
    const furthest = trace[d]!;
    const k = x - y;
    const down = k === -d || (k !== d && reach(furthest, k - 1) < reach(furthest, k + 1));
    const previousX = d === 0 ? 0 : reach(furthest, down ? k + 1 : k - 1);
    const previousY = d === 0 ? 0 : previousX - (down ? k + 1 : k - 1);
    while (x > previousX && y > previousY) {
      found.push({ kind: "same", text: a[--x]! });
      y--;
    }
    if (d > 0) found.push(down ? { kind: "added", text: b[--y]! } : { kind: "removed", text: a[--x]! });
  }
  return found.reverse();
}

const reach = (furthest: Int32Array, k: number): number => furthest[k + (furthest.length >> 1)]!;

/** For each number of edits the furthest x on each diagonal before it was extended, or null when there are too many. */
function search(a: string[], b: string[]): Int32Array[] | null {
  const most = Math.min(a.length + b.length, MAX_EDITS);
  const middle = most + 1;
  const furthest = new Int32Array(2 * middle + 1);
  const trace: Int32Array[] = [];
  for (let d = 0; d <= most; d++) {
    trace.push(furthest.slice(middle - d - 1, middle + d + 2));
    for (let k = -d; k <= d; k += 2) {
      const left = furthest[middle + k - 1]!;
      const right = furthest[middle + k + 1]!;
      let x = k === -d || (k !== d && left < right) ? right : left + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x++;
      furthest[middle + k] = x;
      if (x >= a.length && x - k >= b.length) return trace;
    }
  }
  return null;
}

function merged(changes: Change[]): Change[] {
  const result: Change[] = [];
  for (const change of changes) {
    const last = result[result.length - 1];
    if (change.text === "") continue;
    if (last?.kind === change.kind) last.text += change.text;
    else result.push({ ...change });
  }
  return result;
}
