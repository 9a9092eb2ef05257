/** The table's rows, page by page: only what is looked at is asked for, one look at a time. */

import { useLayoutEffect, useMemo } from "preact/hooks";
import { forgetMatching, getJson, painted } from "../api/client";
import { messageOf } from "../api/resource";
import { inSnapshot } from "../api/snapshot";
import type { Progress, Row, Rows } from "../api/types";
import { PAGE, rowsAddress, type Selection } from "./selection";
import { createStore, useStore } from "./store";

export interface RowPages {
  /** which selection the rows are of: the one before until the next one's are there */
  shown: string;
  total: number;
  /** how many there can be at most, while hits are being verified; otherwise the total */
  most: number;
  /** why the server does not verify the rest */
  stopped: string | null;
  /** how far the index is, while it is being built */
  partial: Progress | null;
  /** how many of the other split match where none of this one does */
  leftOut: number;
  /** null where the filter chooses it */
  split: string | null;
  loading: boolean;
  error: string | null;
  row: (index: number) => Row | undefined;
  /** says which rows are in view */
  look: (first: number, last: number) => void;
}

interface Held {
  /** which selection, in which version of the run, the pages are of */
  key: string;
  shown: string;
  total: number;
  most: number;
  stopped: string | null;
  partial: Progress | null;
  leftOut: number;
  split: string | null;
  error: string | null;
  pages: Map<number, Row[]>;
}

/** Rows so near to those in view are asked for as well. */
const NEAR = 30;

/** So many pages are kept in memory. */
const KEPT = 60;

/** While the server verifies hits, it is asked again after this pause. */
export const VERIFYING_MS = 300;

export function useRowPages(run: string, rows: Selection, version: number): RowPages {
  const loader = useMemo(() => new RowLoader(), []);
  const shown = JSON.stringify([run, rows]);
  const key = `${shown} ${version}`;
  const held = useStore(loader.held);
  useLayoutEffect(() => loader.select(key, shown, (page) => rowsAddress(run, rows, page * PAGE)), [key]);
  useLayoutEffect(() => () => loader.stop(), []);
  const { total, most, stopped, partial, leftOut, split, pages } = held;
  const current = held.key === key;
  return {
    shown: held.shown,
    total,
    most,
    stopped,
    partial,
    leftOut,
    split,
    loading: !current,
    error: current ? held.error : null,
    row: (index) => pages.get(Math.floor(index / PAGE))?.[index % PAGE],
    look: loader.look,
  };
}

/** Rows of an earlier selection stay in view until the first page of the next one is there. */
class RowLoader {
  readonly held = createStore<Held>({
    key: "",
    shown: "",
    total: 0,
    most: 0,
    stopped: null,
    partial: null,
    leftOut: 0,
    split: "train",
    error: null,
    pages: new Map(),
  });
  private key = "";
  private shown = "";
  private url: (page: number) => string = () => "";
  private view: [first: number, last: number] = [0, 0];
  private busy = false;
  /** until the rows in view are on the screen */
  private resting: Promise<void> | undefined;
  private again: ReturnType<typeof setTimeout> | undefined;

  select(key: string, shown: string, url: (page: number) => string): void {
    // Another selection is read from its beginning.
    if (shown !== this.shown) this.view = [0, this.view[1] - this.view[0]];
    [this.key, this.shown, this.url] = [key, shown, url];
    this.load();
  }

  readonly look = (first: number, last: number): void => {
    this.view = [first, last];
    this.load();
  };

  stop(): void {
    clearTimeout(this.again);
    this.key = "";
  }

  /** Loads what is missing in view; once that is on the screen, what lies beside it. */
  private load(): void {
    if (this.busy || this.key === "") return;
    const wanted = this.missing();
    if (wanted.length > 0) void this.take(wanted);
    else if (this.beside().length > 0) this.resting ??= painted().then(() => this.loadBeside());
  }

  private loadBeside(): void {
    this.resting = undefined;
    if (this.busy || this.missing().length > 0) return;
    const wanted = this.beside();
    if (wanted.length > 0) void this.take(wanted);
  }

  /** @param anew whether all other pages are dropped once the answers are there */
  private async take(wanted: number[], anew = false): Promise<void> {
    this.busy = true;
    const { key, shown } = this;
    const next = await Promise.all(wanted.map((page) => getJson<Rows>(this.url(page)))).then(
      (answers) =>
        answers.reduce(
          (held, answer, i) => taken(held, { key, shown }, wanted[i]!, answer, anew && i === 0),
          this.held.get(),
        ),
      (error: unknown): Held => refused(this.held.get(), { key, shown }, wanted, messageOf(error)),
    );
    this.busy = false;
    if (key === this.key) {
      this.held.set(next);
      this.verify();
    }
    this.load();
  }

  /** The pages in view that are not there. */
  private missing(): number[] {
    const { key, total, error } = this.held.get();
    const [first, last] = this.view;
    if (key !== this.key) return this.absent(first, last);
    if (error !== null) return [];
    // Where nothing is found yet, the first page is asked for again as well.
    const end = Math.max(0, total - 1);
    return this.absent(Math.min(first, end), Math.min(last, end));
  }

  /** The pages near those in view, once somebody scrolls. */
  private beside(): number[] {
    const { key, total, error } = this.held.get();
    const [first, last] = this.view;
    if (key !== this.key || error !== null || first === 0) return [];
    return this.absent(Math.max(0, first - NEAR), Math.min(last + NEAR, Math.max(0, total - 1)));
  }

  private absent(first: number, last: number): number[] {
    const { key, pages } = this.held.get();
    const found: number[] = [];
    for (let page = Math.floor(first / PAGE); page * PAGE <= last; page++) {
      if (key !== this.key || !pages.has(page)) found.push(page);
    }
    return found;
  }

  /** Asks for the pages in view again while the server verifies hits or indexes rollouts, which move the others. */
  private verify(): void {
    clearTimeout(this.again);
    const { most, total, stopped, partial } = this.held.get();
    if ((most <= total && !partial) || stopped || inSnapshot) return;
    this.again = setTimeout(() => {
      if (this.busy) return this.verify();
      const asked = new Set([...this.held.get().pages.keys()].map((page) => this.url(page)));
      forgetMatching((url) => asked.has(url));
      const [first, last] = this.view.map((row) => Math.floor(Math.min(row, Math.max(0, total - 1)) / PAGE));
      void this.take(
        Array.from({ length: last! - first! + 1 }, (_, i) => first! + i),
        true,
      );
    }, VERIFYING_MS);
  }
}

/** What there is already stays; the pages that cannot be had are empty. */
function refused(held: Held, of: Pick<Held, "key" | "shown">, wanted: number[], error: string): Held {
  if (held.key !== of.key || held.pages.size === 0) return { ...held, ...of, total: 0, error, pages: new Map() };
  return { ...held, pages: new Map([...held.pages, ...wanted.map((page): [number, Row[]] => [page, []])]) };
}

function taken(
  held: Held,
  of: Pick<Held, "key" | "shown">,
  page: number,
  { total, most = total, stopped = null, partial = null, left_out: leftOut = 0, split = "train", rows }: Rows,
  anew: boolean,
): Held {
  // A page that was not full may be by now, as more hits have been verified.
  const kept = held.key === of.key && !anew ? [...held.pages].filter(([, known]) => known.length === PAGE) : [];
  const pages = new Map(kept);
  pages.set(page, rows);
  if (pages.size > KEPT) pages.delete(pages.keys().next().value!);
  return { ...of, total, most, stopped, partial, leftOut, split, error: null, pages };
}
