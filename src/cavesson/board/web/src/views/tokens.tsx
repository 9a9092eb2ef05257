/** One response token by token: as coloured text, as strips, and the critic against what came. */

import { useEffect, useMemo, useState } from "preact/hooks";
import { address, onRest } from "../api/client";
import { useResource } from "../api/resource";
import { loadTokens, type Tokens as Loaded, turnStarts } from "../api/tokens";
import type { RolloutKey } from "../api/types";
import { useText } from "../i18n";
import { number, whole } from "../maths/format";
import { available } from "../maths/metrics";
import { gist } from "../maths/prompt";
import { oneLine, visible } from "../maths/text";
import { CopyButton } from "../parts/copy-button";
import { FactList } from "../parts/facts";
import { Problem } from "../parts/failure";
import { openTokens } from "../parts/rollout-line";
import { LabelPanel } from "../parts/labels";
import { PromptText } from "../parts/prompt";
import { Siblings } from "../parts/siblings";
import { Star } from "../parts/star";
import { answered, Conversation, turnsOf } from "../parts/conversation";
import { useRun, useStep } from "../state/board";
import { useKeys } from "../state/keys";
import { currentRoute, patchRoute, useRoute } from "../state/router";
import { createStore } from "../state/store";
import { toggleStar, useLabels } from "../state/labels";
import { useAfterPaint } from "../tokens/after-paint";
import { HeatPanel } from "../tokens/heat-panel";
import { Legend } from "../tokens/legend";
import { MetricChips } from "../tokens/metric-chips";
import { Strips } from "../tokens/strips";
import { TokenCard } from "../tokens/token-card";
import { TokenText } from "../tokens/token-text";
import { ValueChart } from "../tokens/value-chart";
import { type Looked, measure, type Measured } from "../tokens/measured";

/** Of a response of more tokens, the text is painted before the pictures below it. */
const LONG = 4000;

/** A longer prompt starts folded. */
const LONG_PROMPT = 280;

export function Tokens() {
  const t = useText();
  const run = useRun();
  const step = useStep();
  const { query } = useRoute();
  const sample = Number(query["sample"] ?? 0);
  const { data, error } = useResource<Loaded>(`runs/${run.run}/rollouts/${step}/${sample}`, 0, loadTokens);
  const gamma = useGamma(run.run);
  useEffect(() => {
    const next = data?.rollout.next;
    if (next) onRest(() => loadTokens(`runs/${run.run}/rollouts/${next.step}/${next.sample}`));
  }, [data]);
  const seen = useAfterPaint(data !== null);
  const metric = query["metric"] ?? available(run.columns.tokens)[0]?.key ?? "logprob";
  return (
    <main class="view">
      <Problem text={error} />
      {data && (
        <Opened
          key={`${run.run}.${data.rollout.step}.${data.rollout.sample}`}
          run={run.run}
          loaded={data}
          gamma={gamma}
          seen={seen}
        />
      )}
      {data?.count === 0 && <p class="empty">{t("noTokens")}</p>}
      <HeatPanel
        run={run.run}
        split={data?.rollout.split === "eval" ? "eval" : undefined}
        metric={metric}
        shown={seen}
      />
    </main>
  );
}

/** What run.json says of the algorithm; older runs call its settings by its name. */
interface RunInfo {
  config?: Record<string, { gamma?: unknown } | undefined>;
  section?: string;
  algorithm?: string;
}

/** The discount of the run's settings; 1 where they do not say. */
function useGamma(run: string): number {
  const info = useResource<RunInfo>(address(`runs/${run}/info`)).data;
  const gamma = info?.config?.[info.section ?? info.algorithm ?? ""]?.gamma;
  return typeof gamma === "number" ? gamma : 1;
}

function Opened({ run, loaded, gamma, seen }: { run: string; loaded: Loaded; gamma: number; seen: boolean }) {
  const t = useText();
  const { query } = useRoute();
  const measured = useMemo(() => measure(loaded, gamma), [loaded, gamma]);
  const [looked] = useState(() => createStore<Looked>({ token: null, pinned: null, reveal: 0 }));
  const chosen = measured.find(({ metric }) => metric.key === query["metric"]) ?? measured[0];
  const strips = stripsOf(measured, query["strips"]);
  const shown = chosen ? [chosen, ...(query["stripes"] === "1" ? strips : [])] : [];
  const { rollout } = loaded;
  // Without a metric, the text alone says as much, unless some of its tokens were not learned.
  const byToken = chosen !== undefined || notLearned(loaded) > 0;
  const painted = useAfterPaint(true, loaded.count > LONG);
  useTokenKeys(run, loaded, measured, looked);
  return (
    <>
      <Header run={run} loaded={loaded} />
      <LabelPanel run={run} row={rollout} />
      <Prompt text={rollout.prompt} length={rollout.prompt_truncated} />
      {byToken && (
        <>
          {chosen && (
            <div class="bar metrics">
              <MetricChips measured={measured} chosen={chosen} strips={strips} />
              <Legend measured={chosen} />
            </div>
          )}
          <div class="tokens">
            <div class="stack">
              <TokenText loaded={loaded} shown={shown} looked={looked} />
              {seen && painted && <Strips loaded={loaded} strips={strips} looked={looked} />}
              {seen && painted && <ValueChart loaded={loaded} measured={measured} looked={looked} />}
            </div>
            <TokenCard loaded={loaded} measured={measured} looked={looked} />
          </div>
        </>
      )}
      {!byToken && <Conversation turns={turnsOf(rollout)} />}
      {rollout.ref_response !== null && (
        <details class="more">
          <summary>
            {t("reference")} · {number(rollout.ref_reward)}
          </summary>
          <Conversation turns={answered(rollout.ref_response)} muted />
        </details>
      )}
    </>
  );
}

/** Without a choice the first few that say most together. */
function stripsOf(measured: Measured[], chosen: string | undefined): Measured[] {
  const wanted = chosen?.split(",") ?? ["kl_k1", "value", "token_reward", "entropy"];
  return measured.filter(({ metric }) => wanted.includes(metric.key));
}

function useTokenKeys(
  run: string,
  loaded: Loaded,
  measured: Measured[],
  looked: ReturnType<typeof createStore<Looked>>,
): void {
  const { rollout, count } = loaded;
  const open = (place: Loaded["rollout"]["next"]): void => {
    if (place) openTokens(run, place.step, place.sample);
  };
  const walk = (by: number): void => {
    const { pinned, reveal } = looked.get();
    const token = Math.min(count - 1, Math.max(0, (pinned ?? (by > 0 ? -1 : count)) + by));
    looked.set({ token: null, pinned: token, reveal: reveal + 1 });
  };
  const turns = [...turnStarts(loaded).keys()].sort((a, b) => a - b);
  const turn = (by: number): void => {
    const { pinned, reveal } = looked.get();
    const at = pinned ?? -1;
    const token = by > 0 ? turns.find((first) => first > at) : turns.findLast((first) => first < at);
    if (token !== undefined) looked.set({ token: null, pinned: token, reveal: reveal + 1 });
  };
  const digits = measured
    .slice(0, 9)
    .map(({ metric }, i) => [String(i + 1), () => patchRoute({ metric: metric.key }, true)] as const);
  useKeys({
    ...Object.fromEntries(digits),
    j: () => open(rollout.next ?? null),
    k: () => open(rollout.previous ?? null),
    s: () => void toggleStar(run, rollout),
    n: () => turn(1),
    p: () => turn(-1),
    ArrowRight: () => walk(1),
    ArrowLeft: () => walk(-1),
    Escape: () => looked.set({ token: null, pinned: null, reveal: 0 }),
  });
  useEffect(() => {
    const at = Number(currentRoute().query["token"] ?? NaN);
    if (at >= 0 && at < count) looked.set({ token: null, pinned: at, reveal: 1 });
    return looked.watch(() => patchRoute({ token: looked.get().pinned ?? undefined }, true));
  }, []);
}

const notLearned = ({ columns }: Loaded): number =>
  Array.from(columns["learned"] ?? []).filter((learned) => learned === 0).length;

function Header({ run, loaded }: { run: string; loaded: Loaded }) {
  const t = useText();
  const labels = useLabels();
  const { rollout, count } = loaded;
  const masked = notLearned(loaded);
  const padding = rollout.tokens?.padding ?? 0;
  const facts: [string, string][] = [
    [t("reward"), number(rollout.reward)],
    ["kl_k1", number(rollout["kl_k1"])],
    [t("tokens"), whole(count)],
    ...(masked > 0 ? [[t("notLearned"), whole(masked)] as [string, string]] : []),
    ...(padding > 0 ? [[t("paddingHidden"), whole(padding)] as [string, string]] : []),
    [t("finish"), visible(rollout.finish_reason ?? "–")],
  ];
  return (
    <div class="bar">
      <Star run={run} row={rollout} labels={labels} label={t("star")} />
      <h2>
        {t("stepNumber", { step: rollout.step })} · {t("sampleNumber", { sample: rollout.sample })}
      </h2>
      <Neighbour run={run} place={rollout.previous ?? null} sign="‹" title={t("previousRow")} />
      <Neighbour run={run} place={rollout.next ?? null} sign="›" title={t("nextRow")} />
      <FactList facts={facts} />
      <CopyButton text={() => loaded.units.map(({ text }) => text).join("")} />
      <span class="space" />
      <Siblings run={run} rollout={rollout} />
    </div>
  );
}

interface NeighbourProps {
  run: string;
  place: RolloutKey | null;
  sign: string;
  title: string;
}

function Neighbour({ run, place, sign, title }: NeighbourProps) {
  const open = (): void => void (place && openTokens(run, place.step, place.sample));
  return (
    <button type="button" class="quiet" title={title} aria-label={title} disabled={!place} onClick={open}>
      {sign}
    </button>
  );
}

function Prompt({ text, length }: { text: string; length: number | null }) {
  const t = useText();
  return (
    <details class="prompt" open={text.length <= LONG_PROMPT}>
      <summary>
        {t("prompt")}
        <span class="muted line">{oneLine(gist(text).slice(-160))}</span>
      </summary>
      <PromptText text={text} whole={length} />
    </details>
  );
}
