/** The same prompts side by side, those first where the sides differ most. */

import type { Comparison } from "../api/types";
import { curveColour, usePalette } from "../charts/palette";
import { useText } from "../i18n";
import { number, signed, whole } from "../maths/format";
import type { Side } from "../maths/sides";
import { gist } from "../maths/prompt";
import { oneLine, visible } from "../maths/text";
import { patchRoute } from "../state/router";
import { PROMPTS } from "../views/compare";
import { Pages } from "./pages";
import { PromptLink } from "./prompt-link";
import { openTokens } from "./rollout-line";
import { SaveTable } from "./save-table";
import { Segments } from "./segments";
import { useSideName } from "./side-bar";

/** Where the sides differ most; where the last side is ahead; where the first is. */
export const ORDERS = ["spread", "-difference", "difference"] as const;

interface Props {
  sides: Side[];
  comparison: Comparison;
  order: (typeof ORDERS)[number];
  offset: number;
  loading: boolean;
}

export function ComparedPrompts({ sides, comparison, order, offset, loading }: Props) {
  const t = useText();
  const name = useSideName();
  const orders = {
    spread: t("mostSpread"),
    "-difference": t("winsFirst", { name: name(sides[sides.length - 1]!) }),
    difference: t("winsFirst", { name: name(sides[0]!) }),
  };
  return (
    <section>
      <div class="section">
        <h2>{t("samePrompts")}</h2>
        <span class="muted">{loading ? "…" : whole(comparison.total)}</span>
        <span class="space" />
        <SaveTable name={t("samePrompts")} rows={() => table(comparison, sides.map(name))} />
        {comparison.wins && (
          <Segments
            options={orders}
            chosen={order}
            onChoose={(key) => patchRoute({ sort: key, offset: undefined }, true)}
          />
        )}
      </div>
      {comparison.prompts.length === 0 && <p class="empty">{t("noSharedPrompts")}</p>}
      {comparison.prompts.map((prompt) => (
        <OnePrompt key={prompt.prompt} sides={sides} prompt={prompt} ranked={comparison.wins !== null} />
      ))}
      <Pages name="offset" offset={offset} size={PROMPTS} total={comparison.total} />
    </section>
  );
}

function table({ prompts }: Comparison, names: string[]): unknown[][] {
  const columns = ["step", "sample", "mean", "n", "response"] as const;
  const head = ["prompt", ...names.flatMap((name) => columns.map((column) => `${name}: ${column}`))];
  const rows = prompts.map(({ prompt, runs }) => [prompt, ...runs.flatMap((side) => columns.map((key) => side[key]))]);
  return [head, ...rows];
}

interface PromptProps {
  sides: Side[];
  prompt: Comparison["prompts"][number];
  /** whether rewards of the sides can be compared */
  ranked: boolean;
}

function OnePrompt({ sides, prompt: { prompt_id: id, prompt, runs }, ranked }: PromptProps) {
  const t = useText();
  const colours = usePalette();
  const [first, last] = [runs[0]?.mean ?? null, runs[runs.length - 1]?.mean ?? null];
  const difference = first === null || last === null ? null : last - first;
  return (
    <article class="group">
      <header>
        <PromptLink run={sides[0]!.run} id={id} class="line">
          {oneLine(gist(prompt))}
        </PromptLink>
        {ranked && (
          <b class={`number ${(difference ?? 0) < 0 ? "warning" : ""}`} title={t("differenceHint")}>
            {signed(difference)}
          </b>
        )}
      </header>
      <div class="siblings">
        {runs.map(({ mean, n, step, sample, response }, i) => (
          <button
            key={i}
            type="button"
            onClick={() => openTokens(sides[i]!.run, step, sample)}
            title={t("stepNumber", { step })}
          >
            <span class="side">
              <i style={{ background: curveColour(colours, i) }} />
              <b>{number(mean, 3)}</b>
              {n > 1 && <span class="muted">× {n}</span>}
            </span>
            <span class="text">{visible(response)}</span>
          </button>
        ))}
      </div>
    </article>
  );
}
