/** The whole response as a map: one row per line, one mark per token, and the part in view. */

import { useEffect, useRef } from "preact/hooks";
import { type Palette, usePalette } from "../charts/palette";
import { useText } from "../i18n";
import { tint } from "../maths/colour";
import type { Line } from "../maths/layout";
import type { Unit } from "../maths/units";
import { type Store, useStore } from "../state/store";
import type { Measured } from "./measured";

/** First and last line in view. */
export type Seen = readonly [first: number, last: number];

interface Props {
  lines: Line[];
  units: Unit[];
  chosen: Measured | undefined;
  width: number;
  seen: Store<Seen>;
  onGo: (line: number) => void;
}

export function Minimap(props: Props) {
  const { lines, chosen, width, seen, onGo } = props;
  const t = useText();
  const colours = usePalette();
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const later = setTimeout(() => paint(canvas.current!, props, colours));
    return () => clearTimeout(later);
  }, [lines, chosen, colours, width]);
  const go = (event: PointerEvent): void => {
    const box = canvas.current!.getBoundingClientRect();
    onGo(Math.floor(((event.clientY - box.top) / box.height) * lines.length));
  };
  return (
    <div
      class="minimap"
      role="img"
      aria-label={t("minimap")}
      onPointerDown={(event) => {
        event.currentTarget.setPointerCapture(event.pointerId);
        go(event);
      }}
      onPointerMove={(event) => event.buttons === 1 && go(event)}
    >
      <canvas ref={canvas} />
      <Shade seen={seen} total={lines.length} />
    </div>
  );
}

function Shade({ seen, total }: { seen: Store<Seen>; total: number }) {
  const [first, last] = useStore(seen);
  const share = (lines: number): string => `${(100 * Math.min(lines, total)) / total}%`;
  return <div class="shade" style={{ top: share(first), height: `max(6px, ${share(last - first)})` }} />;
}

function paint(canvas: HTMLCanvasElement, { lines, units, chosen, width }: Props, colours: Palette): void {
  const ratio = devicePixelRatio;
  canvas.width = canvas.clientWidth * ratio;
  canvas.height = canvas.clientHeight * ratio;
  const context = canvas.getContext("2d")!;
  const row = canvas.height / lines.length;
  const scale = canvas.width / (width || 1);
  // Where lines are thinner than a pixel, one of them stands for its pixel.
  const every = Math.max(1, Math.floor(1 / row));
  lines.forEach((line, at) => {
    if (at % every !== 0) return;
    let x = 0;
    for (const { unit, width: wide } of line.fragments) {
      const colour = chosen && tint(chosen.scale, chosen.values[units[unit]!.first]!, colours.hues);
      context.fillStyle = colour ?? `${colours.faint}30`;
      const left = line.direction === "rtl" ? canvas.width - x - wide * scale : x;
      context.fillRect(left, at * row, wide * scale, Math.max(1, row * 0.9));
      x += wide * scale;
    }
  });
}
