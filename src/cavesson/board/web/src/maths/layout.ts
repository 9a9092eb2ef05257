/** Breaks units of tokens into lines, so that only the lines in view need to exist in the page. */

import { direction, visible } from "./text";
import type { Unit } from "./units";

export interface Fragment {
  unit: number;
  text: string;
  width: number;
}

export interface Line {
  fragments: Fragment[];
  direction: "ltr" | "rtl";
  /** the line ends because the text has a newline, not because it is full */
  ends: boolean;
  /** the line stands for the turn that begins with this unit */
  head?: number;
}

/** A token longer than this is cut for the eye; the whole text is in the response view. */
const LONGEST = 2000;

const CJK = /[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uff60\u{20000}-\u{3ffff}]/u;

class Breaker {
  lines: Line[] = [];
  private current: Fragment[] = [];
  private width = 0;
  private breakAt = 0;
  private paragraphStart = 0;
  private paragraph = "";

  constructor(private readonly limit: number) {}

  add(fragment: Fragment, mayBreak: boolean): void {
    if (mayBreak) this.breakAt = this.current.length;
    if (this.width + fragment.width > this.limit && this.current.length > 0) this.wrap();
    this.current.push(fragment);
    this.width += fragment.width;
    if (this.paragraph.length < 200) this.paragraph += fragment.text;
  }

  /** Ends the line at its last break; a word without one is cut where it stands. */
  private wrap(): void {
    const at = this.breakAt > 0 ? this.breakAt : this.current.length;
    const rest = this.current.slice(at);
    this.push(this.current.slice(0, at), false);
    this.current = rest;
    this.width = rest.reduce((sum, fragment) => sum + fragment.width, 0);
    this.breakAt = 0;
  }

  private push(fragments: Fragment[], ends: boolean): void {
    this.lines.push({ fragments, direction: "ltr", ends });
  }

  /** A separate line where a turn begins. */
  head(unit: number): void {
    this.endParagraph(false);
    this.lines.push({ fragments: [], direction: "ltr", ends: true, head: unit });
    this.paragraphStart = this.lines.length;
  }

  endParagraph(ends: boolean): void {
    if (this.current.length > 0 || ends) this.push(this.current, ends);
    const way = direction(this.paragraph);
    for (let i = this.paragraphStart; i < this.lines.length; i++) this.lines[i]!.direction = way;
    this.paragraphStart = this.lines.length;
    this.current = [];
    this.width = 0;
    this.breakAt = 0;
    this.paragraph = "";
  }
}

/** A text that stands on one line, measured once however often it comes. */
interface Piece {
  text: string;
  width: number;
  /** a line may end before it */
  opens: boolean;
  /** a line may end after it */
  closes: boolean;
}

/** What lies between two newlines of a token. */
interface Part {
  pieces: Piece[];
  ends: boolean;
}

/**
 * @param units what joinTokens returned
 * @param limit width of a line in pixels
 * @param measure width of a text in pixels
 * @param heads units with which a turn begins
 */
export function breakLines(
  units: readonly Unit[],
  limit: number,
  measure: (text: string) => number,
  heads: ReadonlySet<number> = new Set(),
): Line[] {
  const breaker = new Breaker(limit);
  const known = new Map<string, Part[]>();
  let open = true;
  units.forEach(({ text }, unit) => {
    if (heads.has(unit)) {
      breaker.head(unit);
      open = true;
    }
    let parts = known.get(text);
    if (!parts) known.set(text, (parts = partsOf(text, limit, measure)));
    for (const part of parts) {
      for (const piece of part.pieces) {
        breaker.add({ unit, text: piece.text, width: piece.width }, open || piece.opens);
        open = piece.closes;
      }
      if (part.ends) {
        breaker.endParagraph(true);
        open = true;
      }
    }
  });
  breaker.endParagraph(false);
  return breaker.lines;
}

function partsOf(text: string, limit: number, measure: (text: string) => number): Part[] {
  const whole = text.length > LONGEST ? `${text.slice(0, LONGEST)}…` : text;
  const lines = whole.split("\n");
  return lines.map((line, place): Part => {
    const ends = place < lines.length - 1;
    const seen = visible(line.replace(/\r$/, "")).replace(/\t/g, "⇥") + (ends ? "↵" : "");
    return { ends, pieces: cut(seen, limit, measure).map((piece) => pieceOf(piece, measure(piece))) };
  });
}

function pieceOf(text: string, width: number): Piece {
  const [first, last] = [text[0]!, text[text.length - 1]!];
  return {
    text,
    width,
    opens: /\s/.test(first) || CJK.test(first),
    closes: /[\s\-–—/]/.test(last) || CJK.test(last),
  };
}

/** A text wider than the line in parts that fit. */
function cut(text: string, limit: number, measure: (text: string) => number): string[] {
  if (text === "") return [];
  const width = measure(text);
  if (width <= limit) return [text];
  const characters = Array.from(text);
  const size = Math.max(1, Math.floor((characters.length * limit) / width / 1.1));
  const found: string[] = [];
  for (let i = 0; i < characters.length; i += size) found.push(characters.slice(i, i + size).join(""));
  return found;
}

/** For each token the index of the line it starts on. */
export function lineOfToken(lines: readonly Line[], units: readonly Unit[], tokens: number): Int32Array {
  const found = new Int32Array(tokens).fill(-1);
  lines.forEach((line, at) => {
    for (const fragment of line.fragments) {
      const unit = units[fragment.unit]!;
      for (let i = unit.first; i < unit.first + unit.count; i++) if (found[i]! < 0) found[i] = at;
    }
  });
  return found;
}
