/** Horizontal bars: numbers by name, several beside each other where a name has several. */

import { useCallback } from "preact/hooks";
import type { Bars } from "../maths/answer";
import { number } from "../maths/format";
import { finite } from "../maths/numbers";
import { beginning, oneLine } from "../maths/text";
import { Card } from "../parts/card";
import { bottomAxis, type Frame, horizontal } from "./axes";
import { curveColour } from "./line-spec";
import { type Palette, usePalette } from "./palette";
import { type Pen, straight, svgOf } from "./pen";
import { Picture } from "./picture";

interface Props {
  title: string;
  bars: Bars;
  note: string | null;
}

const BAR = 14;
const GAP = 8;
const AXIS = 22;
const LETTER = 6.2;
/** Pixels for the number beside a bar. */
const ROOM = 54;

export function BarChart({ title, bars, note }: Props) {
  const colours = usePalette();
  const tall = bars.names.length * (bars.values.length * BAR + GAP) + AXIS;
  const draw = useCallback(
    (pen: Pen, width: number, height: number): void => drawBars(pen, width, height, 4, bars, colours),
    [bars, colours],
  );
  const drawFile = (pen: Pen): void => drawBars(pen, 720, tall + 36, 36, bars, colours);
  return (
    <Card title={title} level={2} save={() => svgOf(720, tall + 36, colours, drawFile, title)}>
      {bars.values.length > 1 && (
        <div class="legend">
          {bars.values.map(({ name }, i) => (
            <span key={name} class="key">
              <i style={{ background: curveColour(colours, i) }} />
              {name}
            </span>
          ))}
        </div>
      )}
      <Picture draw={draw} height={tall + 4} label={title} />
      {note && <p class="muted">{note}</p>}
    </Card>
  );
}

function drawBars(pen: Pen, width: number, height: number, top: number, bars: Bars, colours: Palette): void {
  const longest = Math.max(0, ...bars.names.map((name) => name.length));
  const left = Math.min(width * 0.4, 12 + longest * LETTER);
  const frame: Frame = { left, top, right: width - ROOM, bottom: height - AXIS };
  const known = finite(bars.values.flatMap(({ numbers }) => numbers));
  const [low, high] = known.reduce<[number, number]>(
    ([a, b], value) => [Math.min(a, value), Math.max(b, value)],
    [0, 0],
  );
  const x = horizontal(frame, low, high);
  bottomAxis(pen, frame, low, high, colours);
  straight(pen, [x(0), frame.top], [x(0), frame.bottom], { colour: colours.line });
  const group = bars.values.length * BAR + GAP;
  bars.names.forEach((name, at) => {
    const above = frame.top + at * group + GAP / 2;
    const middle = above + (group - GAP) / 2 + 4;
    const label = beginning(oneLine(name), Math.max(3, Math.floor((left - 12) / LETTER)));
    pen.text(left - 6, middle, label, { colour: colours.ink, align: "right" });
    bars.values.forEach(({ numbers }, i) => {
      const value = numbers[at] ?? null;
      if (value === null) return;
      const from = Math.min(x(0), x(value));
      const long = Math.max(1, Math.abs(x(value) - x(0)));
      pen.rect(from, above + i * BAR + 1, long, BAR - 2, curveColour(colours, i));
      pen.text(from + long + 4, above + i * BAR + BAR - 3, number(value, 3), { colour: colours.muted, size: 10.5 });
    });
  });
}
