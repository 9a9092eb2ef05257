/** One rollout beside the table: its texts, numbers, reference, siblings, relatives and labels. */

import { useEffect, useRef, useState } from "preact/hooks";
import { address, onRest } from "../api/client";
import { useResource } from "../api/resource";
import { rolloutAddress } from "../api/tokens";
import type { Progress, RolloutKey, Rollout, Row } from "../api/types";
import { useText } from "../i18n";
import { number, percent } from "../maths/format";
import { patchRoute, useRoute } from "../state/router";
import { useLabels } from "../state/labels";
import { answered, Conversation, SHOWN, turnsOf, useTurnKeys } from "./conversation";
import { CopyButton } from "./copy-button";
import { Facts } from "./facts";
import { Problem } from "./failure";
import { LabelPanel } from "./labels";
import { openTokens, RolloutLine } from "./rollout-line";
import { Partial } from "./partial";
import { PromptText } from "./prompt";
import { PromptLink } from "./prompt-link";
import { Segments, Switch } from "./segments";
import { Siblings } from "./siblings";
import { Star } from "./star";
import { CutText, Text, TextDifference } from "./text";

interface Props {
  run: string;
  place: RolloutKey;
  search: string;
  onMove: (by: number) => void;
  /** once the text is there and the hand rests */
  onRead: () => void;
}

export function RolloutDetail({ run, place, search, onMove, onRead }: Props) {
  const t = useText();
  const labels = useLabels();
  const { data, error } = useResource<Rollout>(rolloutAddress(run, place));
  const box = useRef<HTMLElement>(null);
  useEffect(() => onRest(onRead), [data]);
  useTurnKeys(box);
  // Until the answer comes, the body shows the rollout before: its star must not stand under this one's name.
  const here = data?.step === place.step && data.sample === place.sample;
  return (
    <aside class="detail" aria-label={t("response")} ref={box}>
      <header>
        {data && here ? <Star run={run} row={data} labels={labels} label={t("star")} /> : <span class="star" />}
        <h2>
          {t("stepNumber", { step: place.step })} · {t("sampleNumber", { sample: place.sample })}
        </h2>
        <span class="space" />
        <button
          type="button"
          class="quiet"
          title={t("previousRow")}
          aria-label={t("previousRow")}
          onClick={() => onMove(-1)}
        >
          ↑
        </button>
        <button type="button" class="quiet" title={t("nextRow")} aria-label={t("nextRow")} onClick={() => onMove(1)}>
          ↓
        </button>
        <button type="button" onClick={() => openTokens(run, place.step, place.sample)}>
          {t("tokens")}
        </button>
        <button type="button" class="quiet" aria-label={t("close")} onClick={() => patchRoute({ at: undefined }, true)}>
          ✕
        </button>
      </header>
      <Problem text={error} />
      {data && <Body run={run} rollout={data} search={search} key={`${data.step}.${data.sample}`} />}
    </aside>
  );
}

function Body({ run, rollout, search }: { run: string; rollout: Rollout; search: string }) {
  const t = useText();
  const { query } = useRoute();
  const compared = query["diff"] === "1";
  const shown = SHOWN.find((one) => one === query["shown"]) ?? "turns";
  const { ref_response: reference } = rollout;
  return (
    <div class="body">
      <LabelPanel run={run} row={rollout} />
      <Facts rollout={rollout} />
      <h3>
        {t("prompt")} <ToPrompt run={run} rollout={rollout} />
      </h3>
      <PromptText text={rollout.prompt} search={search} whole={rollout.prompt_truncated} muted />
      <h3>
        {t("response")} <span class="muted">{number(rollout.reward)}</span>
        {!compared && (
          <Segments
            options={{ turns: t("asTurns"), markdown: "Markdown", text: t("asText") }}
            chosen={shown}
            onChoose={(key) => patchRoute({ shown: key === "turns" ? undefined : key }, true)}
          />
        )}
        <CopyButton text={() => rollout.response} />
        {reference !== null && <Switch name="diff" label={t("difference")} class="quiet" />}
      </h3>
      {compared && reference !== null ? (
        <TextDifference before={reference} after={rollout.response} />
      ) : shown === "text" ? (
        <Text text={rollout.response} search={search} whole={rollout.response_truncated} />
      ) : (
        <>
          <Conversation turns={turnsOf(rollout)} search={search} markdown={shown === "markdown"} />
          <CutText whole={rollout.response_truncated} />
        </>
      )}
      {reference !== null && (
        <>
          <h3>
            {t("reference")} <span class="muted">{number(rollout.ref_reward)}</span>
          </h3>
          <Conversation turns={answered(reference)} search={search} markdown={shown === "markdown"} muted />
          <CutText whole={rollout.ref_response_truncated} />
        </>
      )}
      {rollout.ground_truth !== null && (
        <>
          <h3>{t("groundTruth")}</h3>
          <Text text={rollout.ground_truth} search="" whole={rollout.ground_truth_truncated} />
        </>
      )}
      <Siblings run={run} rollout={rollout} />
      <Similar run={run} place={rollout} />
      {rollout.extra && (
        <details>
          <summary>{t("extra")}</summary>
          <Text text={rollout.extra} search="" whole={rollout.extra_truncated} muted />
        </details>
      )}
    </div>
  );
}

export function ToPrompt({ run, rollout }: { run: string; rollout: Rollout }) {
  const t = useText();
  if (!rollout.prompt_id) return null;
  return (
    <PromptLink run={run} id={rollout.prompt_id} split={rollout.split === "eval" ? "eval" : undefined}>
      {t("toPrompt")}
    </PromptLink>
  );
}

function Similar({ run, place }: { run: string; place: Rollout }) {
  const t = useText();
  const [open, setOpen] = useState(false);
  const asked = { split: place.split === "eval" ? place.split : undefined, limit: 12 };
  const url = open ? address(`runs/${run}/similar/${place.step}/${place.sample}`, asked) : null;
  const { data, error } = useResource<{ rows: (Row & { shared: number })[]; partial?: Progress | null }>(url);
  return (
    <>
      <h3>
        <button type="button" onClick={() => setOpen(true)} disabled={open}>
          {t("similar")}
        </button>
      </h3>
      <Problem text={error} />
      <Partial of={data?.partial} />
      {data?.rows.length === 0 && !data.partial && <p class="muted">{t("nothingSimilar")}</p>}
      {data?.rows.map((row) => (
        <div class="shared" key={row.row}>
          <span class="muted number" title={t("sharedHint")}>
            {percent(row.shared, 0)}
          </span>
          <RolloutLine
            run={run}
            step={row.step}
            sample={row.sample}
            reward={row.reward}
            response={row.answer ?? row.response}
          />
        </div>
      ))}
    </>
  );
}
