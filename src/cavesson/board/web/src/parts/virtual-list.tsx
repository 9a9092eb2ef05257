/** Rows of one height, of which only those in view exist; ten million of them scroll like fifty. */

import type { ComponentChildren, VNode } from "preact";
import { useImperativeHandle, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Ref } from "preact";
import { barAtRest, barHeight, type Extent, topAfter } from "../maths/scroll";

export interface ListHandle {
  /** Brings a row into view, to the middle if it was out of view. */
  reveal: (row: number) => void;
  /** Puts a row at the top. */
  jump: (row: number) => void;
  /** The first row in view, as a fraction. */
  top: () => number;
  focus: () => void;
}

interface Props {
  total: number;
  rowHeight: number;
  row: (index: number) => ComponentChildren;
  head?: ComponentChildren;
  headHeight?: number;
  width?: string;
  class?: string;
  /** a grid has a row for its head */
  role: "grid" | "region";
  /** id of the row that the keys move */
  active?: string | undefined;
  label: string;
  handle?: Ref<ListHandle>;
  onRange?: (first: number, last: number) => void;
  onScroll?: (top: number, view: number) => void;
  /** moves to the next or the previous row; without it, arrows scroll */
  onArrow?: (by: 1 | -1) => void;
}

/** So many drawn rows are kept. */
const KEPT = 400;

/**
 * The same row as last time: what is not drawn anew costs nothing.
 *
 * @param draw a row by its index
 */
export function remembering(draw: (index: number) => VNode): (index: number) => VNode {
  const known = new Map<number, VNode>();
  return (index) => {
    let row = known.get(index);
    if (!row) {
      if (known.size > KEPT) known.clear();
      known.set(index, (row = draw(index)));
    }
    return row;
  };
}

/** When the hand rests this long, the scroll bar is put where the rows are. */
const REST_MS = 160;

/** Rows come and go so many at a time: the browser lays out and paints only those that come. */
const CHUNK = 2;

/** So many chunks beyond the view are drawn where it moves to. */
const AHEAD = 3;

export function VirtualList(props: Props) {
  const { total, rowHeight, headHeight = 0 } = props;
  const grid = props.role === "grid";
  const box = useRef<HTMLDivElement>(null);
  const view = useHeight(box);
  const extent: Extent = { whole: total * rowHeight + headHeight, view };
  const { top, bar, ahead, onScroll, jump } = useScroll(box, extent, rowHeight * CHUNK, props.onScroll);
  const first = Math.floor(top() / rowHeight / CHUNK) - (ahead < 0 ? AHEAD : 0);
  const last = Math.floor((top() + view - headHeight) / rowHeight / CHUNK) + (ahead > 0 ? AHEAD : 0);
  const from = Math.max(0, first * CHUNK);
  const to = Math.min(total, (last + 1) * CHUNK);
  useLayoutEffect(() => jump(top()), [total, view, rowHeight]);
  useLayoutEffect(() => props.onRange?.(from, to), [from, to]);
  useImperativeHandle(props.handle ?? null, () => ({
    top: () => top() / rowHeight,
    focus: () => box.current!.focus({ preventScroll: true }),
    jump: (row) => jump(row * rowHeight),
    reveal: (row) => jump(revealed(row * rowHeight, top(), view - headHeight - rowHeight)),
  }));

  const chunks = [];
  for (let start = from; start < to; start += CHUNK) {
    const rows = [];
    for (let index = start; index < Math.min(to, start + CHUNK); index++) rows.push(props.row(index));
    const above = bar() - top() + headHeight + start * rowHeight;
    const place = { top: `${above}px`, height: `${rows.length * rowHeight}px` };
    chunks.push(
      <div key={start} class="chunk" style={place} role={grid ? "rowgroup" : undefined}>
        {rows}
      </div>,
    );
  }
  return (
    <div
      ref={box}
      class={`virtual ${props.class ?? ""}`}
      onScroll={onScroll}
      onKeyDown={props.onArrow && ((event) => arrow(event, props.onArrow!))}
      tabIndex={0}
      role={props.role}
      aria-label={props.label}
      aria-rowcount={grid ? total + 1 : undefined}
      aria-activedescendant={props.active}
    >
      <div class="extent" style={{ height: `${barHeight(extent)}px`, width: props.width ?? "100%" }}>
        {props.head}
        {chunks}
      </div>
    </div>
  );
}

function arrow(event: KeyboardEvent, move: (by: 1 | -1) => void): void {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key] as 1 | -1 | undefined;
  if (by === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  move(by);
}

type Box = { current: HTMLDivElement | null };

function useHeight(box: Box): number {
  const [height, setHeight] = useState(600);
  useLayoutEffect(() => {
    const watcher = new ResizeObserver(() => setHeight(box.current!.clientHeight));
    watcher.observe(box.current!);
    return () => watcher.disconnect();
  }, []);
  return height;
}

interface Scroll {
  /** pixel of the whole where the view begins, and of the bar */
  top: () => number;
  bar: () => number;
  /** the way of the last small move: rows that are about to come into view are drawn before they do */
  ahead: -1 | 0 | 1;
  onScroll: () => void;
  /** puts the view at a pixel of the whole */
  jump: (top: number) => void;
}

/**
 * The browser scrolls by itself; the list is drawn anew when other chunks come into view, or the place of the bar no
 * longer tells the place in the whole.
 */
function useScroll(box: Box, extent: Extent, chunk: number, tell: Props["onScroll"]): Scroll {
  const state = useRef({ top: 0, bar: 0, ahead: 0 as Scroll["ahead"], rest: 0 as unknown as Timer });
  const [, drawAt] = useState("");
  const redraw = (): void => {
    const { top, bar, ahead } = state.current;
    drawAt([Math.floor(top / chunk), Math.floor((top + extent.view) / chunk), bar - top, ahead].join());
  };
  const settle = (): void => {
    const bar = barAtRest(extent, state.current.top, state.current.bar);
    // Asking where the bar is would make the browser lay out the page.
    if (bar !== state.current.bar) box.current!.scrollTop = bar;
    state.current.bar = bar;
    redraw();
  };
  useLayoutEffect(() => () => clearTimeout(state.current.rest), []);
  return {
    top: () => state.current.top,
    bar: () => state.current.bar,
    ahead: state.current.ahead,
    jump: (top) => {
      Object.assign(state.current, {
        top: Math.min(Math.max(0, top), Math.max(0, extent.whole - extent.view)),
        ahead: 0,
      });
      tell?.(state.current.top, extent.view);
      settle();
    },
    onScroll: () => {
      const before = state.current;
      const bar = box.current!.scrollTop;
      if (bar === before.bar) return;
      const top = topAfter(extent, before.top, before.bar, bar);
      const small = Math.abs(top - before.top) < extent.view;
      const ahead = small ? (Math.sign(top - before.top) as Scroll["ahead"]) : 0;
      Object.assign(before, { top, bar, ahead });
      tell?.(top, extent.view);
      redraw();
      clearTimeout(before.rest);
      before.rest = setTimeout(settle, REST_MS);
    },
  };
}

type Timer = ReturnType<typeof setTimeout>;

/** The least move that shows a row; one far away comes to the middle. */
function revealed(row: number, top: number, room: number): number {
  if (row >= top && row <= top + room) return top;
  const far = row < top - room || row > top + 2 * room;
  if (far) return row - room / 2;
  return row < top ? row : row - room;
}
