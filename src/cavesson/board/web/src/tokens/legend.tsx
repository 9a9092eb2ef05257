/** What the colours mean: the limits, and how far the data goes beyond them. */

import { useCallback } from "preact/hooks";
import { usePalette } from "../charts/palette";
import type { Pen } from "../charts/pen";
import { Picture } from "../charts/picture";
import { useText } from "../i18n";
import { tint } from "../maths/colour";
import { number } from "../maths/format";
import type { Measured } from "./measured";

export function Legend({ measured: { metric, scale, values } }: { measured: Measured }) {
  const t = useText();
  const colours = usePalette();
  const draw = useCallback(
    (pen: Pen, width: number, height: number): void => {
      for (let x = 0; x < width; x++) {
        const colour = tint(scale, scale.low + ((x + 0.5) / width) * (scale.high - scale.low), colours.hues);
        if (colour) pen.rect(x, 0, 1, height, colour);
      }
    },
    [scale, colours],
  );
  const beyond = values.reduce((count, value) => count + (value < scale.low || value > scale.high ? 1 : 0), 0);
  return (
    <span class="scale" title={beyond > 0 ? t("beyondLimits", { count: beyond }) : undefined}>
      <span>{number(scale.low, 3)}</span>
      <Picture draw={draw} height={10} label={metric.key} />
      <span>
        {number(scale.high, 3)}
        {beyond > 0 && " +"}
      </span>
    </span>
  );
}
