/** Runs, or stretches of a run, beside each other: curves, who wins, and the same prompts. */

import { useMemo, useRef } from "preact/hooks";
import { address } from "../api/client";
import { useResource } from "../api/resource";
import type { Comparison, RunSummary } from "../api/types";
import { HistogramChart } from "../charts/histogram";
import { curveColour } from "../charts/line-spec";
import { usePalette } from "../charts/palette";
import { useText } from "../i18n";
import { formatSides, parseSides, type Side, usualSides } from "../maths/sides";
import { ComparedCurves } from "../parts/compared-curves";
import { ComparedPrompts, ORDERS } from "../parts/compared-prompts";
import { ComparedRescored } from "../parts/compared-rescored";
import { ComparedSettings } from "../parts/compared-settings";
import { Problem } from "../parts/failure";
import { HeldOutSwitch } from "../parts/held-out";
import { SideBar, useSideName } from "../parts/side-bar";
import { WinsTable } from "../parts/wins-table";
import { runs } from "../state/board";
import { patchRoute, useRoute } from "../state/router";
import { splitOf } from "../state/selection";
import { useStore } from "../state/store";

export const PROMPTS = 25;

export function Compare() {
  const t = useText();
  const colours = usePalette();
  const all = useStore(runs)!;
  const { query } = useRoute();
  const name = useSideName();
  const of = (name: string): RunSummary | undefined => all.find(({ run }) => run === name);
  const known = (side: Side): boolean => of(side.run) !== undefined;
  const text = query["sides"] ?? "";
  const sides = useMemo(() => {
    const given = parseSides(text).filter(known);
    return given.length > 0 ? given : usualSides(all);
  }, [text, all.length]);
  const offset = Number(query["offset"] ?? 0);
  const order = ORDERS.find((one) => one === query["sort"]) ?? "spread";
  const asked = {
    split: splitOf(query),
    runs: formatSides(sides),
    sort: order,
    q: query["find"],
    offset,
    limit: PROMPTS,
  };
  const url = address("compare", asked);
  const { data, error, loading } = useResource<Comparison>(sides.length > 1 ? url : null);
  const answered = useRef(sides); // those of an earlier answer, as long as the next one is on its way
  if (!loading) answered.current = sides;
  const shown = answered.current;
  const compared = [...new Set(sides.map(({ run }) => run))].flatMap((run) => of(run) ?? []);
  const heldOut = compared.reduce((sum, run) => sum + run.held_out, 0);
  const set = (next: Side[]): void => patchRoute({ sides: formatSides(next), offset: undefined }, true);
  const usable = data && data.sides.length === shown.length ? data : null;
  const different = usable && usable.rewards_differ.length > 0 ? usable.rewards_differ.join(", ") : null;
  return (
    <main class="view">
      <SideBar sides={sides} onChange={set}>
        <HeldOutSwitch count={heldOut} />
      </SideBar>
      {different !== null && (
        <p class="warning" role="alert">
          {t("rewardsDiffer", { what: different })}
        </p>
      )}
      <ComparedCurves sides={sides} />
      <ComparedSettings sides={sides} />
      <ComparedRescored runs={compared} />
      <Problem text={error} />
      {usable && (
        <div class="two">
          <WinsTable sides={shown} comparison={usable} />
          {usable.differences && (usable.common ?? usable.total) > 0 && (
            <HistogramChart
              title={t("differenceOf", { a: name(shown[shown.length - 1]!), b: name(shown[0]!) })}
              hint={t("differenceHint")}
              edges={usable.differences.edges}
              rule={0}
              distributions={[
                {
                  name: t("prompts"),
                  counts: usable.differences.counts,
                  colour: `${curveColour(colours, shown.length - 1)}99`,
                  filled: true,
                },
              ]}
            />
          )}
        </div>
      )}
      {usable && <ComparedPrompts sides={shown} comparison={usable} order={order} offset={offset} loading={loading} />}
    </main>
  );
}
