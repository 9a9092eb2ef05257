/** The same prompts side by side, those first where the sides differ most. */

import { useRef, useState } from "preact/hooks";
import { address } from "../api/client";
import { useResource } from "../api/resource";
import type { Comparison, Rows } from "../api/types";
import { curveColour } from "../charts/line-spec";
import { usePalette } from "../charts/palette";
import { useText } from "../i18n";
import { number, signed, whole } from "../maths/format";
import type { Side } from "../maths/sides";
import { gist } from "../maths/prompt";
import { oneLine, visible } from "../maths/text";
import { useKeys } from "../state/keys";
import { patchRoute, useRoute } from "../state/router";
import { splitOf } from "../state/selection";
import { PROMPTS } from "../views/compare";
import { Problem } from "./failure";
import { Field } from "./field";
import { Pages } from "./pages";
import { PromptLink } from "./prompt-link";
import { filterOf } from "./prompt-page";
import { openTokens, RolloutLine } from "./rollout-line";
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
  const search = useRef<HTMLInputElement>(null);
  useKeys({ "/": () => search.current?.focus() });
  const open = useRoute().query["read"];
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
        <Field name="find" hint={t("findPrompt")} class="search" field={search} />
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
      {comparison.prompts.length === 0 && <p class="empty">{t(comparison.common ? "noPrompts" : "noSharedPrompts")}</p>}
      {comparison.prompts.map((prompt) => (
        <OnePrompt
          key={prompt.prompt_id ?? prompt.prompt}
          sides={sides}
          prompt={prompt}
          ranked={comparison.wins !== null}
          open={open !== undefined && open === prompt.prompt_id}
          onOpen={(id) => patchRoute({ read: open === id ? undefined : id }, true)}
        />
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
  /** whether all responses are shown */
  open: boolean;
  onOpen: (id: string) => void;
}

function OnePrompt({ sides, prompt: { prompt_id: id, prompt, runs }, ranked, open, onOpen }: PromptProps) {
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
        {id !== undefined && (
          <button type="button" class={open ? "on" : ""} aria-expanded={open} onClick={() => onOpen(id)}>
            {t("allResponses")}
          </button>
        )}
      </header>
      {open && (
        <div class="siblings">
          {sides.map((side, i) => (
            <SideResponses key={i} side={side} index={i} id={id!} />
          ))}
        </div>
      )}
      <div class="siblings" hidden={open}>
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

/** So many responses of a side are shown at first. */
const FIRST = 20;

/** The server gives no more at once. */
const MOST = 500;

/** All responses of a side to a prompt, the best first. */
function SideResponses({ side, index, id }: { side: Side; index: number; id: string }) {
  const t = useText();
  const colours = usePalette();
  const name = useSideName();
  const split = splitOf(useRoute().query);
  const [limit, setLimit] = useState(FIRST);
  const steps = side.steps ? side.steps.join("-") : undefined;
  const asked = { split, steps, filter: filterOf(id), sort: "-reward", offset: 0, limit };
  const { data, error } = useResource<Rows>(address(`runs/${side.run}/rows`, asked));
  if (error) return <Problem text={error} />;
  return (
    <section class="side-responses" aria-label={name(side)}>
      <span class="side">
        <i style={{ background: curveColour(colours, index) }} />
        {name(side)} <span class="muted">{whole(data?.total)}</span>
      </span>
      {data?.rows.map((row) => (
        <RolloutLine
          key={`${row.step}.${row.sample}`}
          run={side.run}
          {...{ step: row.step, sample: row.sample, reward: row.reward }}
          response={row.answer ?? row.response}
        />
      ))}
      {data && data.total > data.rows.length && limit < MOST && (
        <button type="button" onClick={() => setLimit(Math.min(10 * limit, MOST))}>
          {t("more")}
        </button>
      )}
    </section>
  );
}
