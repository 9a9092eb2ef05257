/** What the critic expected at each token against what then came, and the error between them. */

import { useCallback, useMemo } from "preact/hooks";
import type { Tokens } from "../api/tokens";
import { leftAxis, vertical, type Frame } from "../charts/axes";
import { type Palette, usePalette } from "../charts/palette";
import { type Pen, type Point, straight, type SvgFile, svgOf } from "../charts/pen";
import { Picture } from "../charts/picture";
import { Card } from "../parts/card";
import { useText } from "../i18n";
import { number } from "../maths/format";
import { clamp, finite, limits, thinned } from "../maths/numbers";
import { type Store, useStore } from "../state/store";
import { Cross } from "./cross";
import type { Looked, Measured } from "./measured";

interface Props {
  loaded: Tokens;
  measured: Measured[];
  looked: Store<Looked>;
}

const HEIGHT = 150;
/** As the strips above have it (--name in tokens.css): a token stands at the same place in both. */
const LEFT = 104;

export function ValueChart({ loaded, measured, looked }: Props) {
  const t = useText();
  const colours = usePalette();
  const of = (key: string): Float32Array | undefined => measured.find(({ metric }) => metric.key === key)?.values;
  const [value, target, error] = [of("value"), of("return_to_go"), of("monte_carlo_error")];
  const draw = useCallback(
    (pen: Pen, width: number, height: number): void =>
      drawValues(pen, { left: LEFT, top: 8, right: width, bottom: height - 8 }, value!, target!, colours),
    [value, target, colours],
  );
  if (!value || !target || !error) return null;
  const tokenAt = (x: number, width: number): number =>
    clamp(Math.floor(((x - LEFT) / (width - LEFT)) * loaded.count), 0, loaded.count - 1);
  const save = (): SvgFile => svgOf(900, 300, colours, (pen) => draw(pen, 900, 300));
  return (
    <Card title={t("valueTitle")} hint={t("valueHint")} save={save}>
      <Numbers value={value} target={target} error={error} looked={looked} />
      <div class="crossed">
        <Picture
          draw={draw}
          height={HEIGHT}
          label={t("valueTitle")}
          onPoint={(x, _, width) => looked.set({ ...looked.get(), token: x === null ? null : tokenAt(x, width) })}
          onClick={(x, _, width) =>
            looked.set({ token: null, pinned: tokenAt(x, width), reveal: looked.get().reveal + 1 })
          }
        />
        <Cross count={loaded.count} looked={looked} left={LEFT} />
      </div>
    </Card>
  );
}

interface NumbersProps {
  value: Float32Array;
  target: Float32Array;
  error: Float32Array;
  looked: Store<Looked>;
}

function Numbers({ value, target, error, looked }: NumbersProps) {
  const t = useText();
  const colours = usePalette();
  const { token, pinned } = useStore(looked);
  const at = token ?? pinned;
  const size = useMemo(() => rootMeanSquare(error), [error]);
  const shown = (values: Float32Array): string => (at === null ? "" : number(values[at], 3));
  return (
    <div class="legend">
      <span class="key">
        <i style={{ background: colours.s3 }} />
        {t("value")} <b>{shown(value)}</b>
      </span>
      <span class="key">
        <i style={{ background: colours.s1 }} />
        {t("returnToGo")} <b>{shown(target)}</b>
      </span>
      <span class="key">
        <i style={{ background: `${colours.warm}66` }} />
        {t("error")} <b>{shown(error)}</b>
      </span>
      <span class="key">
        {t("rootMeanSquare")} <b>{number(size, 3)}</b>
      </span>
    </div>
  );
}

function rootMeanSquare(values: Float32Array): number {
  const kept = finite(values);
  return Math.sqrt(kept.reduce((sum, one) => sum + one * one, 0) / kept.length);
}

function drawValues(pen: Pen, frame: Frame, value: Float32Array, target: Float32Array, colours: Palette): void {
  const [expected, came] = [thinned(value, frame.right), thinned(target, frame.right)];
  const [low, high] = limits([...expected.map((i) => value[i]!), ...came.map((i) => target[i]!), 0], false);
  const room = (high - low) * 0.06;
  const y = vertical(frame, low - room, high + room);
  const place = (amount: number): number => clamp(y(amount), frame.top, frame.bottom);
  const x = (token: number): number => frame.left + ((token + 0.5) / value.length) * (frame.right - frame.left);
  leftAxis(pen, frame, low - room, high + room, colours);
  if (low <= 0 && high >= 0) straight(pen, [frame.left, y(0)], [frame.right, y(0)], { colour: colours.faint });
  const points = (values: Float32Array, at: number[]): Point[] => at.map((i): Point => [x(i), place(values[i]!)]);
  const [upper, lower] = [points(value, expected), points(target, came)];
  pen.area([...upper, ...[...lower].reverse()], `${colours.warm}40`);
  pen.line(lower, { colour: colours.s1, width: 1.6 });
  pen.line(upper, { colour: colours.s3, width: 1.3 });
}
