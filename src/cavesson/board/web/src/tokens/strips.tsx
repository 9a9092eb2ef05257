/** Metrics of all tokens as strips, one above the other, over the same tokens. */

import { useCallback } from "preact/hooks";
import type { Tokens } from "../api/tokens";
import { type Palette, usePalette } from "../charts/palette";
import { type Pen, type Point, straight, type SvgFile, svgOf } from "../charts/pen";
import { Picture } from "../charts/picture";
import { Card } from "../parts/card";
import { useText } from "../i18n";
import { strength } from "../maths/colour";
import { number } from "../maths/format";
import { clamp } from "../maths/numbers";
import type { Store } from "../state/store";
import { Cross } from "./cross";
import type { Looked, Measured } from "./measured";

interface Props {
  loaded: Tokens;
  strips: Measured[];
  looked: Store<Looked>;
}

const HEIGHT = 38;

export function Strips({ loaded, strips, looked }: Props) {
  const t = useText();
  const colours = usePalette();
  if (strips.length === 0) return null;
  const drawFile = (pen: Pen): void =>
    strips.forEach((strip, i) => {
      pen.text(12, 20 + i * 52, strip.metric.key, { colour: colours.muted, size: 11 });
      drawStrip(shifted(pen, 12, 24 + i * 52), 876, HEIGHT, strip, colours);
    });
  const save = (): SvgFile => svgOf(900, 20 + strips.length * 52, colours, drawFile);
  return (
    <Card title={t("strips")} hint={t("stripsHint")} class="strips" save={save}>
      <div class="lanes">
        {strips.map((strip) => (
          <div key={strip.metric.key} class="lane">
            <span class="name">
              {strip.metric.key}
              <small>
                {number(strip.scale.low, 2)} … {number(strip.scale.high, 2)}
              </small>
            </span>
            <Lane strip={strip} looked={looked} />
          </div>
        ))}
        <div class="lane-cross">
          <Cross count={loaded.count} looked={looked} left={0} />
        </div>
      </div>
    </Card>
  );
}

function Lane({ strip, looked }: { strip: Measured; looked: Store<Looked> }) {
  const colours = usePalette();
  const count = strip.values.length;
  const at = (x: number, width: number): number => clamp(Math.floor((x / width) * count), 0, count - 1);
  const draw = useCallback(
    (pen: Pen, width: number, height: number): void => drawStrip(pen, width, height, strip, colours),
    [strip, colours],
  );
  return (
    <Picture
      height={HEIGHT}
      label={strip.metric.key}
      draw={draw}
      onPoint={(x, _, width) => looked.set({ ...looked.get(), token: x === null ? null : at(x, width) })}
      onClick={(x, _, width) => looked.set({ token: null, pinned: at(x, width), reveal: looked.get().reveal + 1 })}
    />
  );
}

/** Bars from zero; where tokens are narrower than a pixel, the lowest and highest of each pixel. */
function drawStrip(pen: Pen, width: number, height: number, strip: Measured, colours: Palette): void {
  const { values, scale, metric } = strip;
  const signed = metric.kind === "signed";
  const down = metric.kind === "surprise";
  const zero = signed ? height / 2 : down ? 1 : height - 1;
  const reach = signed ? height / 2 - 1 : height - 2;
  straight(pen, [0, zero], [width, zero], { colour: colours.line });
  const columns = Math.min(values.length, Math.floor(width));
  const wide = width / Math.max(1, columns);
  const hue = colours.hues[metric.kind === "signed" ? "positive" : metric.kind];
  for (let column = 0; column < columns; column++) {
    const end = Math.floor(((column + 1) * values.length) / columns);
    let [low, high] = [0, 0];
    for (let i = Math.floor((column * values.length) / columns); i < end; i++) {
      const value = values[i]!;
      if (Number.isNaN(value)) continue;
      const amount = strength(scale, value);
      low = Math.min(low, amount);
      high = Math.max(high, amount);
    }
    const gap = wide > 3 ? 1 : 0;
    if (high > 0) pen.rect(column * wide, down ? zero : zero - high * reach, wide - gap, high * reach, hue);
    if (low < 0) pen.rect(column * wide, zero, wide - gap, -low * reach, colours.hues.negative);
  }
}

function shifted(pen: Pen, dx: number, dy: number): Pen {
  const moved = (points: readonly Point[]): Point[] => points.map(([x, y]) => [x + dx, y + dy]);
  return {
    line: (points, stroke) => pen.line(moved(points), stroke),
    area: (points, colour) => pen.area(moved(points), colour),
    rect: (x, y, width, height, colour) => pen.rect(x + dx, y + dy, width, height, colour),
    text: (x, y, text, words) => pen.text(x + dx, y + dy, text, words),
  };
}
