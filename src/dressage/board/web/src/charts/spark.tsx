/** A small curve beside a number, and a range around a number. */

import { usePalette } from "./palette";
import type { Pen, Point } from "./pen";
import { Picture } from "./picture";
import type { Maybe } from "../maths/numbers";

export function Spark({
  values,
  high,
  label,
  height = 22,
}: {
  values: Maybe[];
  high: number;
  label: string;
  height?: number;
}) {
  const colours = usePalette();
  const draw = (pen: Pen, width: number, tall: number): void => {
    const points = values.flatMap((value, i): Point[] =>
      value === null
        ? []
        : [[1 + (i / Math.max(1, values.length - 1)) * (width - 4), tall - 2 - (value / (high || 1)) * (tall - 5)]],
    );
    if (points.length === 0) return;
    pen.area([[points[0]![0], tall - 1], ...points, [points[points.length - 1]![0], tall - 1]], `${colours.accent}22`);
    pen.line(points, { colour: colours.accent, width: 1.4 });
    const [x, y] = points[points.length - 1]!;
    pen.rect(x - 1.5, y - 1.5, 3, 3, colours.accent);
  };
  return <Picture draw={draw} height={height} label={label} class="spark" />;
}

/** A number with its interval on a scale symmetric about zero. */
export function Whisker({
  value,
  interval,
  most,
  label,
}: {
  value: Maybe;
  interval: [number, number] | null;
  most: number;
  label: string;
}) {
  const colours = usePalette();
  const draw = (pen: Pen, width: number, tall: number): void => {
    const x = (at: number): number => width / 2 + (Math.max(-1, Math.min(1, at / (most || 1))) * (width - 8)) / 2;
    const middle = tall / 2;
    pen.line(
      [
        [width / 2, 3],
        [width / 2, tall - 3],
      ],
      { colour: colours.line },
    );
    if (value === null) return;
    const colour = value < 0 ? colours.warm : colours.accent;
    if (interval)
      pen.line(
        [
          [x(interval[0]), middle],
          [x(interval[1]), middle],
        ],
        { colour, width: 1.5 },
      );
    pen.rect(x(value) - 2.5, middle - 2.5, 5, 5, colour);
  };
  return <Picture draw={draw} height={22} label={label} class="spark" />;
}
