/** Tokens joined to what a reader sees: half characters, combining marks and emoji sequences belong together. */

export interface Unit {
  /** index of the first token */
  first: number;
  /** how many tokens make it up */
  count: number;
  text: string;
}

export type Bytes = readonly (readonly number[] | null)[];

/** A run of marks without end must not become one unit without end. */
const LONGEST = 16;

const MAY_JOIN = /^[\p{M}\p{Emoji_Modifier}\u200d\ufe00-\ufe0f\u{1f1e6}-\u{1f1ff}\u{e0020}-\u{e007f}\u1160-\u11ff]/u;
const ENDS_OPEN = /[\u200d\u{1f1e6}-\u{1f1ff}]$/u;

/**
 * Joins tokens into units.
 *
 * @param texts the tokens' texts, with U+FFFD for what is not a whole character
 * @param bytes by token, the bytes of those that are not whole characters; null for the others
 */
export function joinTokens(texts: readonly string[], bytes: Bytes | null): Unit[] {
  const segmenter = new Intl.Segmenter(undefined, { granularity: "grapheme" });
  const units: Unit[] = [];
  for (let i = 0; i < texts.length;) {
    const unit = bytes?.[i] ? fromBytes(texts, bytes, i) : { first: i, count: 1, text: texts[i]! };
    const last = units[units.length - 1];
    if (last && last.count + unit.count <= LONGEST && joined(last.text, unit.text, segmenter)) {
      last.text += unit.text;
      last.count += unit.count;
    } else {
      units.push(unit);
    }
    i += unit.count;
  }
  return units;
}

/** The longest prefix of the byte tokens from `start` that ends with a whole character; else the token alone. */
function fromBytes(texts: readonly string[], bytes: Bytes, start: number): Unit {
  const collected: number[] = [];
  for (let end = start; end < Math.min(start + LONGEST, texts.length) && bytes[end]; end++) {
    collected.push(...bytes[end]!);
    const text = decoded(collected);
    if (text !== null) return { first: start, count: end - start + 1, text };
  }
  return { first: start, count: 1, text: texts[start]! };
}

function decoded(bytes: number[]): string | null {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(Uint8Array.from(bytes));
  } catch {
    return null; // not whole yet
  }
}

/** Whether no character boundary lies between the two texts. */
function joined(before: string, after: string, segmenter: Intl.Segmenter): boolean {
  // Below U+0300 nothing joins; that is most tokens, and looking costs less than a regular expression.
  if (after.charCodeAt(0) < 0x300 && !(before.charCodeAt(before.length - 1) >= 0x200d)) return false;
  if (!MAY_JOIN.test(after) && !ENDS_OPEN.test(before)) return false;
  const tail = before.slice(-24);
  return segmenter.segment(tail + after).containing(tail.length)?.index !== tail.length;
}
