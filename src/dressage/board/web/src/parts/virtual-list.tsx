/** Rows of one height, of which only those in view exist; ten million of them scroll like fifty. */

import type { ComponentChildren, VNode } from "preact";
import { useEffect, useImperativeHandle, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Ref } from "preact";
import { barAt, barHeight, type Extent, topAfter } from "../maths/scroll";

export interface ListHandle {
  /** Brings a row into view, to the middle if it was out of view. */
  reveal: (row: number) => void;
  /** The first row in view, as a fraction. */
  top: () => number;
}

interface Props {
  total: number;
  rowHeight: number;
  row: (index: number) => ComponentChildren;
  head?: ComponentChildren;
  headHeight?: number;
  width?: string;
  class?: string;
  label: string;
  handle?: Ref<ListHandle>;
  onRange?: (first: number, last: number) => void;
  onScroll?: (top: number, view: number) => void;
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

export function VirtualList(props: Props) {
  const { total, rowHeight, headHeight = 0 } = props;
  const box = useRef<HTMLDivElement>(null);
  const body = useRef<HTMLDivElement>(null);
  const view = useHeight(box);
  const extent: Extent = { whole: total * rowHeight + headHeight, view };
  const { first, onScroll, jump, top } = useScroll(box, body, extent, rowHeight, props.onScroll);
  const count = Math.ceil((view - headHeight) / rowHeight) + 2;
  useLayoutEffect(() => jump(top()), [total, view, rowHeight]);
  useEffect(() => props.onRange?.(first, Math.min(total, first + count)), [first, count, total]);
  useImperativeHandle(props.handle ?? null, () => ({
    top: () => top() / rowHeight,
    reveal: (row) => jump(revealed(row * rowHeight, top(), view - headHeight - rowHeight)),
  }));

  const rows = [];
  for (let index = first; index < Math.min(total, first + count); index++) rows.push(props.row(index));
  return (
    <div
      ref={box}
      class={`virtual ${props.class ?? ""}`}
      onScroll={onScroll}
      tabIndex={0}
      role="grid"
      aria-label={props.label}
      aria-rowcount={total}
    >
      <div class="extent" style={{ height: `${barHeight(extent)}px`, width: props.width ?? "100%" }}>
        <div class="window" style={{ height: `${view}px` }}>
          {props.head}
          <div ref={body} class="rows">
            {rows}
          </div>
        </div>
      </div>
    </div>
  );
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
  /** index of the first row in view */
  first: number;
  onScroll: () => void;
  /** puts the rows at a pixel of the whole */
  jump: (top: number) => void;
  top: () => number;
}

function useScroll(box: Box, body: Box, extent: Extent, rowHeight: number, tell: Props["onScroll"]): Scroll {
  const state = useRef({ top: 0, bar: 0, rest: 0 as unknown as ReturnType<typeof setTimeout> });
  const [first, setFirst] = useState(0);
  const place = (top: number): void => {
    state.current.top = top;
    const row = Math.floor(top / rowHeight);
    body.current!.style.transform = `translateY(${-(top - row * rowHeight)}px)`;
    setFirst(row);
    tell?.(top, extent.view);
  };
  const settle = (): void => {
    const bar = barAt(extent, state.current.top);
    state.current.bar = bar;
    if (Math.abs(box.current!.scrollTop - bar) >= 1) box.current!.scrollTop = bar;
  };
  useLayoutEffect(() => () => clearTimeout(state.current.rest), []);
  return {
    first,
    top: () => state.current.top,
    jump: (top) => {
      place(Math.min(Math.max(0, top), Math.max(0, extent.whole - extent.view)));
      settle();
    },
    onScroll: () => {
      const bar = box.current!.scrollTop;
      if (bar === state.current.bar) return;
      place(topAfter(extent, state.current.top, state.current.bar, bar));
      state.current.bar = bar;
      clearTimeout(state.current.rest);
      state.current.rest = setTimeout(settle, REST_MS);
    },
  };
}

/** The least move that shows a row; one far away comes to the middle. */
function revealed(row: number, top: number, room: number): number {
  if (row >= top && row <= top + room) return top;
  const far = row < top - room || row > top + 2 * room;
  if (far) return row - room / 2;
  return row < top ? row : row - room;
}
