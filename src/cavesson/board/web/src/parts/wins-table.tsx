/** Who wins: the share of the common prompts on which the row's mean reward is higher than the column's. */

import type { Comparison } from "../api/types";
import { curveColour } from "../charts/line-spec";
import { usePalette } from "../charts/palette";
import { useText } from "../i18n";
import { number, percent, whole } from "../maths/format";
import type { Side } from "../maths/sides";
import { Card } from "./card";
import { useSideName } from "./side-bar";

interface Props {
  sides: Side[];
  comparison: Comparison;
}

export function WinsTable({ sides, comparison }: Props) {
  const t = useText();
  const colours = usePalette();
  const name = useSideName();
  const known = comparison.sides;
  return (
    <Card
      level={2}
      title={t(comparison.wins ? "whoWins" : "meanReward")}
      hint={comparison.wins ? t("whoWinsHint") : undefined}
    >
      <table class="plain wins">
        <thead>
          <tr>
            <td />
            <th class="number">{t("rollouts")}</th>
            <th class="number">{t("meanReward")}</th>
            {comparison.wins &&
              sides.map((side, i) => (
                <th key={i} class="number" title={name(side)}>
                  {t("beats", { name: name(side) })}
                </th>
              ))}
          </tr>
        </thead>
        <tbody>
          {sides.map((side, i) => (
            <tr key={i}>
              <td title={name(side)}>
                <span class="side">
                  <i style={{ background: curveColour(colours, i) }} />
                  {name(side)}
                </span>
              </td>
              <td class="number">
                {whole(known[i]?.n)}
                <Unscored side={known[i]} />
              </td>
              <td class="number">{number(known[i]?.mean)}</td>
              {comparison.wins &&
                sides.map((_, j) =>
                  i === j ? <td key={j} /> : <Wins key={j} comparison={comparison} row={i} column={j} />,
                )}
            </tr>
          ))}
        </tbody>
      </table>
    </Card>
  );
}

function Unscored({ side }: { side: Comparison["sides"][number] | undefined }) {
  const t = useText();
  if (!side?.unscored) return null;
  return (
    <div class="muted">{t("unscored", { count: whole(side.unscored), total: whole(side.n + side.unscored) })}</div>
  );
}

/** A cell is the stronger, the more prompts the row wins. */
const STRONGEST = 110;

function Wins({ comparison, row, column }: { comparison: Comparison; row: number; column: number }) {
  const { wins, ties, intervals, common: total = comparison.total } = comparison;
  const t = useText();
  const colours = usePalette();
  const won = wins![row]![column]!;
  const share = total > 0 ? won / total : 0;
  const alpha = Math.round(share * STRONGEST)
    .toString(16)
    .padStart(2, "0");
  return (
    <td
      class="number"
      title={t("winsOf", { wins: whole(won), total: whole(total), ties: whole(ties![row]![column]) })}
      style={{ backgroundColor: colours.hues.positive + alpha }}
    >
      {total > 0 ? percent(share, 0) : "–"}
      {intervals && (
        <div class="interval" title={t("interval95")}>
          {intervals[row]![column]!.map((bound) => percent(bound, 0)).join(" – ")}
        </div>
      )}
    </td>
  );
}
