/** All responses to a prompt: each can be put on a side of the comparison above, by hand or with a key. */

import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { address } from "../api/client";
import { useResource } from "../api/resource";
import type { PromptPage, Row, Rows } from "../api/types";
import { useText } from "../i18n";
import { number, whole } from "../maths/format";
import { placeText, type PromptSide, SIDES, sideOf } from "../maths/sides-of-prompt";
import { gist } from "../maths/prompt";
import { beginning, oneLine, visible } from "../maths/text";
import { tokensRoute, useVersion } from "../state/board";
import { useKeys } from "../state/keys";
import { patchRoute, useRoute } from "../state/router";
import { splitOf } from "../state/selection";
import { Problem } from "./failure";
import { Link } from "./link";
import { Pages } from "./pages";
import { filterOf } from "./prompt-page";
import { openTokens } from "./rollout-line";
import { Segments } from "./segments";

const PAGE = 25;
const ORDERS = ["step", "-step", "-reward", "reward"] as const;

/** No line shows more characters of a response. */
const INSIGHT = 300;

export function PromptResponses({ run, prompt }: { run: string; prompt: PromptPage }) {
  const t = useText();
  const { query } = useRoute();
  const order = ORDERS.find((one) => one === query["order"]) ?? "step";
  const offset = Number(query["from"] ?? 0);
  const split = splitOf(query);
  const asked = { split, filter: filterOf(prompt.prompt_id), sort: order, offset, limit: PAGE };
  const { data, error } = useResource<Rows>(address(`runs/${run}/rows`, asked), useVersion(run));
  const rows = data?.rows ?? [];
  const [at, setAt] = useState<string | null>(null);
  const index = rows.findIndex((row) => placeText(row) === at);
  const move = (by: number): void => {
    const next = rows[index < 0 ? 0 : Math.min(rows.length - 1, Math.max(0, index + by))];
    if (next) setAt(placeText(next));
  };
  const put = (side: PromptSide): void => void (index >= 0 && patchRoute({ [side]: at! }, true));
  useKeys({
    j: () => move(1),
    k: () => move(-1),
    a: () => put("a"),
    b: () => put("b"),
    Enter: () => index >= 0 && openTokens(run, rows[index]!.step, rows[index]!.sample),
    Escape: () => setAt(null),
  });
  const names = { step: t("firstOne"), "-step": t("lastOne"), "-reward": t("bestOne"), reward: t("worstOne") };
  return (
    <section>
      <div class="section">
        <h2>{t("responses")}</h2>
        <span class="muted">{whole(data?.total)}</span>
        <span class="space" />
        <Segments
          options={names}
          chosen={order}
          onChoose={(key) => patchRoute({ order: key, from: undefined }, true)}
        />
      </div>
      <Problem text={error} />
      <table class="plain prompt-responses">
        <thead>
          <tr>
            <td />
            <th class="number">{t("reward")}</th>
            <th class="number wide">{t("lengthName")}</th>
            <th>{t("response")}</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <Line key={placeText(row)} run={run} prompt={prompt} row={row} chosen={placeText(row) === at} />
          ))}
        </tbody>
      </table>
      <Pages name="from" offset={offset} size={PAGE} total={data?.total ?? 0} />
    </section>
  );
}

function Line({ run, prompt, row, chosen }: { run: string; prompt: PromptPage; row: Row; chosen: boolean }) {
  const t = useText();
  const { query } = useRoute();
  const text = row.answer ?? gist(row.response);
  const line = useRef<HTMLTableRowElement>(null);
  // The focus goes along, so that Enter opens the line and presses no button.
  useLayoutEffect(() => void (chosen && line.current?.focus()), [chosen]);
  const isOn = (side: PromptSide): boolean => {
    const place = sideOf(prompt, side, query[side]);
    return place !== null && placeText(place) === placeText(row);
  };
  return (
    <tr class={chosen ? "chosen" : ""} tabIndex={-1} ref={line}>
      <td class="sides">
        {SIDES.map((side) => (
          <button
            key={side}
            type="button"
            class={isOn(side) ? "on" : ""}
            aria-pressed={isOn(side)}
            title={t("putOnSide", { side: side.toUpperCase() })}
            onClick={() => patchRoute({ [side]: placeText(row) }, true)}
          >
            {side.toUpperCase()}
          </button>
        ))}
        <Link to={tokensRoute(run, row.step, row.sample)}>
          {t("stepNumber", { step: row.step })} · {row.sample}
        </Link>
      </td>
      <td class="number">{number(row.reward, 3)}</td>
      <td class="number wide">{whole(row["length"])}</td>
      <td class="line" title={row.finish_reason === null ? "" : visible(row.finish_reason)}>
        {oneLine(beginning(text, INSIGHT))}
      </td>
    </tr>
  );
}
