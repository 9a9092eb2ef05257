/** The responses of a group to be read: side by side or stacked, with what they share folded and differences marked. */

import { useMemo, useState } from "preact/hooks";
import { address } from "../api/client";
import { useResource } from "../api/resource";
import type { GroupDetail, GroupResponse } from "../api/types";
import { useText } from "../i18n";
import { commonBeginning, difference } from "../maths/diff";
import { number, signed, whole } from "../maths/format";
import { beginning, visible } from "../maths/text";
import { tokensRoute, useVersion } from "../state/board";
import { useLabels } from "../state/labels";
import { patchRoute, useRoute } from "../state/router";
import { Problem } from "./failure";
import { Link } from "./link";
import { Partial } from "./partial";
import { Prefer, PreferenceList } from "./preferences";
import { Segments } from "./segments";
import { Star } from "./star";
import { CutText } from "./text";

/** Of a longer response, the rest is shown on demand. */
const SHOWN = 1_500;

/** Less than this is not worth folding. */
const FOLDED = 40;

/** @param props.sample of one of the responses */
export function GroupReader({ run, step, sample }: { run: string; step: number; sample: number }) {
  const t = useText();
  const { query } = useRoute();
  const { data, error } = useResource<GroupDetail>(address(`runs/${run}/groups/${step}/${sample}`), useVersion(run));
  const stacked = query["reading"] === "stacked";
  const responses = data?.responses ?? [];
  const shared = useMemo(() => {
    const found = commonBeginning(responses.map(({ response }) => response));
    return found.length >= FOLDED ? found : "";
  }, [data]);
  const [chosen, setChosen] = useState<GroupResponse | null>(null);
  const base = responses.find((one) => String(one.sample) === query["against"]) ?? null;
  if (error) return <Problem text={error} />;
  if (!data) return null;
  return (
    <div class="group-reader">
      <Partial of={data.partial} />
      <div class="bar">
        <Segments
          options={{ beside: t("sideBySide"), stacked: t("stacked") }}
          chosen={stacked ? "stacked" : "beside"}
          onChoose={(key) => patchRoute({ reading: key === "stacked" ? key : undefined }, true)}
        />
        {data.ground_truth !== null && (
          <span>
            <span class="muted">{t("groundTruth")}</span> <b class="answer">{visible(data.ground_truth)}</b>
          </span>
        )}
        {base && (
          <button type="button" onClick={() => patchRoute({ against: undefined }, true)}>
            {t("unmark")}
          </button>
        )}
        <PreferenceList run={run} responses={responses} />
        {data.total > responses.length && (
          <span class="muted">{t("shownOf", { shown: whole(responses.length), total: whole(data.total) })}</span>
        )}
      </div>
      {shared !== "" && (
        <details class="system shared-beginning">
          <summary>
            {t("sharedBeginning")} <span class="muted">{t("characterCount", { count: whole(shared.length) })}</span>
          </summary>
          <pre class="text muted">{visible(shared)}</pre>
        </details>
      )}
      <div class={stacked ? "stack" : "beside"}>
        {responses.map((one) => (
          <OneResponse key={one.sample} run={run} one={one} base={base} skip={shared.length} all={responses}>
            <Prefer run={run} one={one} chosen={chosen} onChoose={setChosen} />
          </OneResponse>
        ))}
      </div>
    </div>
  );
}

interface OneProps {
  run: string;
  one: GroupResponse;
  /** whose differences from it are marked; null marks none */
  base: GroupResponse | null;
  /** characters that all responses share */
  skip: number;
  all: GroupResponse[];
  /** more to be done with it */
  children: preact.ComponentChildren;
}

function OneResponse({ run, one, base, skip, all, children }: OneProps) {
  const t = useText();
  const labels = useLabels();
  const isBase = base === one;
  const same = all.filter(({ answer }) => answer !== null && answer === one.answer).length;
  return (
    <article class={`read-response ${isBase ? "base" : ""}`}>
      <header>
        <Star run={run} row={one} labels={labels} label={t("star")} />
        <b class="number" title={t("reward")}>
          {number(one.reward, 3)}
        </b>
        {one.advantage !== null && (
          <span title={t("metric_advantage")}>
            <span class="muted">A</span> {signed(one.advantage)}
          </span>
        )}
        <span class="muted">{t("lengthOf", { length: whole(one.length) })}</span>
        {one.finish_reason !== null && <span class="muted">{visible(one.finish_reason)}</span>}
        <span class="space" />
        <Link to={tokensRoute(run, one.step, one.sample)}>{t("sampleNumber", { sample: one.sample })}</Link>
        {children}
        <button
          type="button"
          class={isBase ? "on" : ""}
          aria-pressed={isBase}
          title={t("markAgainstHint")}
          onClick={() => patchRoute({ against: isBase ? undefined : one.sample }, true)}
        >
          {t("markAgainst")}
        </button>
      </header>
      <Parts one={one} />
      {one.answer !== null && (
        <p>
          <span class="muted">{t("finalAnswer")}</span> <b class="answer">{visible(one.answer)}</b>
          {same > 1 && <span class="muted"> × {same}</span>}
        </p>
      )}
      <Said one={one} base={base} skip={skip} />
    </article>
  );
}

/** The parts of the reward, each with its weight in the sum, and the rewards that were computed again. */
function Parts({ one: { parts, weights, reasons, rescored = {} } }: { one: GroupResponse }) {
  const t = useText();
  const [names, again] = [Object.keys(parts), Object.keys(rescored)];
  if (names.length + again.length === 0) return null;
  return (
    <dl class="facts">
      {names.map((name) => (
        <div key={name} title={reasons[name] === undefined ? undefined : visible(reasons[name])}>
          <dt>{visible(name)}</dt>
          <dd>
            {number(parts[name], 3)}
            {weights[name] !== undefined && <span class="muted"> × {number(weights[name], 3)}</span>}
          </dd>
        </div>
      ))}
      {again.map((name) => (
        <div key={`again ${name}`} title={t("rescoredReward")}>
          <dt>↻ {visible(name)}</dt>
          <dd>{number(rescored[name], 3)}</dd>
        </div>
      ))}
    </dl>
  );
}

function Said({ one, base, skip }: { one: GroupResponse; base: GroupResponse | null; skip: number }) {
  const t = useText();
  const [open, setOpen] = useState(false);
  const own = one.response.slice(skip);
  const text = open ? own : beginning(own, SHOWN);
  const changes = useMemo(
    () => (base && base !== one ? difference(base.response.slice(skip), own) : null),
    [base, own, skip],
  );
  if (own === "") return <p class="muted">{t(skip > 0 ? "nothingMore" : "emptyText")}</p>;
  return (
    <>
      <pre class="text">
        {skip > 0 && "…"}
        {changes ? <Changes changes={changes} most={open ? Infinity : SHOWN} /> : visible(text)}
      </pre>
      {own.length > SHOWN && (
        <button type="button" onClick={() => setOpen(!open)}>
          {open ? t("showLess") : t("showMore", { count: whole(own.length) })}
        </button>
      )}
      <CutText whole={one.response_truncated} />
    </>
  );
}

type Difference = ReturnType<typeof difference>;

/** A text with what the other one does not have marked; what only the other has is a narrow sign. */
function Changes({ changes, most }: { changes: Difference; most: number }) {
  const pieces: preact.ComponentChildren[] = [];
  let length = 0;
  for (const { kind, text } of changes) {
    if (length >= most) break;
    if (kind === "removed") {
      pieces.push(<del title={visible(text)}>‸</del>);
      continue;
    }
    const shown = visible(beginning(text, most - length));
    pieces.push(kind === "same" ? shown : <ins>{shown}</ins>);
    length += text.length;
  }
  return <>{pieces}</>;
}
