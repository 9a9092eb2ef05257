/** The prompts whose responses never earned more than the reference's. */

import { useState } from "preact/hooks";
import { address } from "../api/client";
import { useResource } from "../api/resource";
import type { NeverBeats as Prompt } from "../api/types";
import { useText } from "../i18n";
import { signed, whole } from "../maths/format";
import { gist } from "../maths/prompt";
import { oneLine } from "../maths/text";
import { useRun, useVersion } from "../state/board";
import { go, useRoute } from "../state/router";
import { showing, splitOf } from "../state/selection";
import { useSeries } from "../state/series";
import { Problem } from "./failure";
import { shownSplit, titled } from "./held-out";
import { openTokens } from "./rollout-line";

const PAGE = 30;

/** The server gives no more at once. */
const MOST = 500;

export function NeverBeats() {
  const t = useText();
  const run = useRun();
  const [limit, setLimit] = useState(PAGE);
  const series = useSeries(run.run);
  const split = shownSplit(series, "gap", splitOf(useRoute().query));
  const url = series && address(`runs/${run.run}/never-beats`, { split, offset: 0, limit });
  const { data, error } = useResource<{ total: number; prompts: Prompt[] }>(url, useVersion(run.run));
  if (error) return <Problem text={error} />;
  if (!data) return null;
  const open = ({ group, last_step: step, last_sample: sample }: Prompt): void =>
    group === null
      ? openTokens(run.run, step, sample)
      : go("responses", { run: run.run, filter: `group == ${group}`, sort: "-reward", ...showing(split) });
  return (
    <section>
      <div class="section">
        <h2>{titled(t("neverBeats"), split, t)}</h2>
        <span class="muted">{t("neverBeatsHint", { total: whole(data.total) })}</span>
      </div>
      {data.prompts.length > 0 && (
        <table class="plain">
          <thead>
            <tr>
              <th>{t("prompt")}</th>
              <th class="number">{t("tries")}</th>
              <th class="number">{t("bestGap")}</th>
              <th class="number">{t("lastStep")}</th>
            </tr>
          </thead>
          <tbody>
            {data.prompts.map((prompt) => (
              <tr
                key={`${prompt.last_step}/${prompt.last_sample}`}
                class="click"
                tabIndex={0}
                onClick={() => open(prompt)}
                onKeyDown={(event) => event.key === "Enter" && open(prompt)}
              >
                <td class="line">{oneLine(gist(prompt.prompt))}</td>
                <td class="number">{whole(prompt.tries)}</td>
                <td class="number">{signed(prompt.best_gap)}</td>
                <td class="number">{prompt.last_step}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {data.total > data.prompts.length && (
        <p class="muted">{t("shownOf", { shown: whole(data.prompts.length), total: whole(data.total) })}</p>
      )}
      {data.total > limit && limit < MOST && (
        <button type="button" onClick={() => setLimit(Math.min(limit * 2, MOST))}>
          {t("more")}
        </button>
      )}
    </section>
  );
}
