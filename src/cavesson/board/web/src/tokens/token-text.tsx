/** The response as coloured text. Only the lines in view are in the page, so length does not matter. */

import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { turnStarts, type Tokens, whyNotLearned } from "../api/tokens";
import type { Turn } from "../api/types";
import { type Palette, usePalette } from "../charts/palette";
import { useText } from "../i18n";
import { PALE, STRONGEST, tint } from "../maths/colour";
import { breakLines, type Line, lineOfToken } from "../maths/layout";
import { direction } from "../maths/text";
import type { Unit } from "../maths/units";
import { TurnLabel } from "../parts/turn-label";
import { type ListHandle, remembering, VirtualList } from "../parts/virtual-list";
import { createStore, type Store } from "../state/store";
import type { Looked, Measured } from "./measured";
import { useAfterPaint } from "./after-paint";
import { Minimap, type Seen } from "./minimap";

interface Props {
  loaded: Tokens;
  /** the first behind the text, the others as stripes below it */
  shown: Measured[];
  looked: Store<Looked>;
}

const TEXT_HEIGHT = 27;
const STRIPE = 4;
/** The box has at least so many lines, and this share of the window. */
const LEAST_LINES = 15;
const SHARE = 0.6;
/** Of a long response so many units come first: more than fits into the box. */
const FIRST = 2000;
/** what the box around the lines takes, and what it leaves above the first */
const INSET = 28;
const ABOVE = 8;
/** between two tokens, as .tok has it */
const GAP = 1;

const stripesHeight = (shown: Measured[]): number => (shown.length > 1 ? (shown.length - 1) * STRIPE + 3 : 0);

export function TokenText({ loaded, shown, looked }: Props) {
  const t = useText();
  const colours = usePalette();
  const box = useRef<HTMLDivElement>(null);
  const list = useRef<ListHandle>(null);
  const [seen] = useState(() => createStore<Seen>([0, 0]));
  const width = useWidth(box);
  const lineHeight = TEXT_HEIGHT + stripesHeight(shown);
  const label = (token: number): string => {
    const why = whyNotLearned(loaded, token);
    return why === null || why === "whyMarked" ? t("notLearned") : `${t("notLearned")}: ${t(why)}`;
  };
  const turns = useMemo(() => {
    const starts = turnStarts(loaded);
    const heads = [...starts].map(([token, turn]) => [loaded.unitOf[token]!, turn] as const);
    return new Map<number, Turn>(starts.size > 1 ? heads : []);
  }, [loaded]);
  const whole = useAfterPaint(true, loaded.units.length > 2 * FIRST);
  const measure = useMemo(() => measurer(colours.sans), [colours.sans]);
  const lines = useMemo(() => {
    const units = whole ? loaded.units : loaded.units.slice(0, FIRST);
    return width > 0 ? breakLines(units, width - INSET, measure, new Set(turns.keys())) : [];
  }, [loaded, width, whole, measure, turns]);
  const most = Math.max(LEAST_LINES, Math.floor((useWindowHeight() * SHARE) / lineHeight));
  const height = Math.max(lineHeight + 20, Math.min(lines.length, most) * lineHeight + 16);
  const draw = useMemo(
    () =>
      remembering((index) => (
        <TextLine
          key={index}
          line={lines[index]!}
          height={lineHeight}
          loaded={loaded}
          shown={shown}
          colours={colours}
          label={label}
          turn={turns.get(lines[index]!.head ?? -1)}
        />
      )),
    [lines, lineHeight, shown[0], shown.map(({ metric }) => metric.key).join(), colours, t],
  );
  useActiveToken(box, list, lines, loaded, looked);
  return (
    <div class="token-box" style={{ height: `${height}px` }}>
      <div
        class="token-text"
        ref={box}
        onMouseOver={(event) => point(looked, tokenAt(event))}
        onMouseLeave={() => point(looked, null)}
        onCopy={(event) => copySelected(event, loaded)}
        onClick={(event) => looked.set({ ...looked.get(), pinned: tokenAt(event) })}
      >
        {width > 0 && (
          <VirtualList
            role="region"
            label={t("response")}
            total={lines.length}
            rowHeight={lineHeight}
            headHeight={ABOVE}
            row={draw}
            handle={list}
            onScroll={(top, view) => seen.set([top / lineHeight, (top + view) / lineHeight])}
          />
        )}
      </div>
      {lines.length > most && (
        <Minimap
          lines={lines}
          units={loaded.units}
          chosen={shown[0]}
          width={width}
          seen={seen}
          onGo={(line) => list.current?.reveal(line)}
        />
      )}
    </div>
  );
}

/** Copies the text of the selected tokens as it was recorded, without line breaks of the page and names of turns. */
function copySelected(event: ClipboardEvent & { currentTarget: HTMLElement }, { units, unitOf }: Tokens): void {
  const selected = getSelection();
  if (!selected || selected.isCollapsed) return;
  const shown = textsByToken(event.currentTarget);
  const copied = textsByToken(selected.getRangeAt(0).cloneContents());
  if (copied.size === 0) return; // within one token
  const text = [...copied].map(([token, part]) => (part === shown.get(token) ? units[unitOf[token]!]!.text : part));
  event.clipboardData!.setData("text/plain", text.join(""));
  event.preventDefault();
}

/** What is shown of each token, by its first; it may be on two lines. */
function textsByToken(place: ParentNode): Map<number, string> {
  const found = new Map<number, string>();
  for (const one of place.querySelectorAll<HTMLElement>("[data-token]")) {
    const token = Number(one.dataset["token"]);
    found.set(token, (found.get(token) ?? "") + one.textContent);
  }
  return found;
}

function useWindowHeight(): number {
  const [height, setHeight] = useState(innerHeight);
  useLayoutEffect(() => {
    const resized = (): void => setHeight(innerHeight);
    addEventListener("resize", resized);
    return () => removeEventListener("resize", resized);
  }, []);
  return height;
}

function useWidth(box: { current: HTMLElement | null }): number {
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const watcher = new ResizeObserver(([entry]) => setWidth(Math.floor(entry!.contentRect.width)));
    watcher.observe(box.current!);
    return () => watcher.disconnect();
  }, []);
  return width;
}

function tokenAt(event: MouseEvent): number | null {
  const found = (event.target as HTMLElement).closest<HTMLElement>("[data-token]")?.dataset["token"];
  return found === undefined ? null : Number(found);
}

function point(looked: Store<Looked>, token: number | null): void {
  if (token !== looked.get().token) looked.set({ ...looked.get(), token });
}

/** Frames the token looked at without drawing any line anew, and brings it into view when asked. */
function useActiveToken(
  box: { current: HTMLElement | null },
  list: { current: ListHandle | null },
  lines: Line[],
  loaded: Tokens,
  looked: Store<Looked>,
): void {
  const places = useMemo(() => lineOfToken(lines, loaded.units, loaded.count), [lines]);
  useLayoutEffect(() => {
    let revealed = 0;
    const mark = (): void => {
      const { token, pinned, reveal } = looked.get();
      if (reveal > revealed && pinned !== null) list.current?.reveal(Math.max(0, places[pinned] ?? 0));
      revealed = reveal;
      const active = token ?? pinned;
      const first = active === null ? undefined : loaded.units[loaded.unitOf[active]!]?.first;
      for (const old of box.current!.querySelectorAll(".tok.active")) old.classList.remove("active");
      if (first !== undefined)
        for (const now of box.current!.querySelectorAll(`[data-token="${first}"]`)) now.classList.add("active");
    };
    // Lines that scroll into view get the frame as well.
    const watcher = new MutationObserver(mark);
    watcher.observe(box.current!, { childList: true, subtree: true });
    const stop = looked.watch(mark);
    mark();
    return () => {
      watcher.disconnect();
      stop();
    };
  }, [places]);
}

/** Widths of texts, each measured once. */
function measurer(font: string): (text: string) => number {
  const context = document.createElement("canvas").getContext("2d")!;
  context.font = `15px ${font}`;
  const known = new Map<string, number>();
  return (text) => {
    let width = known.get(text);
    if (width === undefined) known.set(text, (width = context.measureText(text).width + GAP));
    return width;
  };
}

interface LineProps {
  line: Line;
  height: number;
  loaded: Tokens;
  shown: Measured[];
  colours: Palette;
  /** of a token that was not learned */
  label: (token: number) => string;
  /** the turn that the line stands for */
  turn: Turn | undefined;
}

function TextLine({ line, height, loaded, shown, colours, label, turn }: LineProps) {
  if (turn)
    return (
      <div class={`token-line turn-line ${turn.error ? "failed" : ""}`} style={{ height: `${height}px` }}>
        <TurnLabel turn={turn} />
      </div>
    );
  return (
    <div class="token-line" dir={line.direction} style={{ height: `${height}px` }}>
      {line.fragments.map((fragment, i) => {
        const unit = loaded.units[fragment.unit]!;
        const masked = whyNotLearned(loaded, unit.first) !== null;
        return (
          <span
            key={i}
            data-token={unit.first}
            class={masked ? "tok masked" : "tok"}
            title={masked ? label(unit.first) : undefined}
            style={background(fragment.text, unit, shown, colours, masked ? PALE : STRONGEST)}
          >
            {fragment.text}
          </span>
        );
      })}
    </div>
  );
}

const colourOf = ({ scale, values }: Measured, token: number, colours: Palette, strongest: number): string =>
  tint(scale, values[token]!, colours.hues, strongest) ?? "transparent";

/** The first metric behind the text, others as stripes below; a character of several tokens is divided among them. */
function background(
  text: string,
  { first, count }: Unit,
  shown: Measured[],
  colours: Palette,
  strongest: number,
): Record<string, string> {
  if (shown.length === 0) return {};
  if (shown.length === 1 && count === 1) return { backgroundColor: colourOf(shown[0]!, first, colours, strongest) };
  const layer = (measured: Measured): string => {
    const tints = Array.from({ length: count }, (_, i) => colourOf(measured, first + i, colours, strongest));
    if (count === 1) return `linear-gradient(${tints[0]},${tints[0]})`;
    const stops = tints.map((colour, i) => `${colour} ${(i / count) * 100}% ${((i + 1) / count) * 100}%`).join(",");
    return `linear-gradient(${direction(text) === "rtl" ? "to left" : "to right"},${stops})`;
  };
  const layers = shown.map(layer);
  const sizes = layers.map((_, i) => (i === 0 ? "100% 21px" : `100% ${STRIPE - 1}px`));
  const places = layers.map((_, i) => (i === 0 ? "0 0" : `0 ${23 + (i - 1) * STRIPE}px`));
  const padding = `${stripesHeight(shown)}px`;
  return {
    backgroundImage: layers.join(","),
    backgroundSize: sizes.join(","),
    backgroundPosition: places.join(","),
    paddingBottom: padding,
  };
}
