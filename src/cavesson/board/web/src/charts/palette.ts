/** The colours of style/base.css for what is drawn on canvases: one truth for both. */

import { appearance } from "../state/preferences";
import { useStore } from "../state/store";
import type { Hues } from "../maths/colour";

const NAMES = [
  "surface",
  "ground",
  "ink",
  "muted",
  "faint",
  "line",
  "accent",
  "reference",
  "warm",
  "good",
  "bad",
  "s1",
  "s2",
  "s3",
  "s4",
  "s5",
  "s6",
  "s7",
  "s8",
  "sans",
] as const;

export type Palette = Record<(typeof NAMES)[number], string> & { hues: Hues };

let known: Palette | null = null;
let of = -1;

export function palette(): Palette {
  if (known && of === appearance.get()) return known;
  const style = getComputedStyle(document.documentElement);
  const read = (name: string): string => style.getPropertyValue(`--${name}`).trim();
  known = {
    ...(Object.fromEntries(NAMES.map((name) => [name, read(name)])) as Record<(typeof NAMES)[number], string>),
    hues: {
      positive: read("positive"),
      negative: read("negative"),
      surprise: read("surprise"),
      fraction: read("fraction"),
    },
  };
  of = appearance.get();
  return known;
}

/** Redraws the component when light turns dark. */
export function usePalette(): Palette {
  useStore(appearance);
  return palette();
}
