/** The strip under the tabs: the run at a glance, and the step that every view shows. */

import { useEffect, useState } from "preact/hooks";
import { address, forgetMatching } from "../api/client";
import { useResource } from "../api/resource";
import type { Diagnosis, Findings, Hits } from "../api/types";
import { Timeline } from "../charts/timeline";
import { language, useText } from "../i18n";
import { moveStep, selectStep, useRun, useStep, useVersion } from "../state/board";
import { useSeries } from "../state/series";
import { useStore } from "../state/store";
import { useRoute } from "../state/router";
import { VERIFYING_MS } from "../state/rows";
import { splitOf } from "../state/selection";

const NONE: Diagnosis = { summary: "", not_excluded: [], last_step: 0, findings: [] };

export function useDiagnosis(run: string): Diagnosis {
  const version = useVersion(run);
  const chosen = useStore(language);
  return useResource<Findings>(address(`runs/${run}/findings`), version).data?.[chosen] ?? NONE;
}

/** Hits by step; while the server still verifies them, it is asked again. */
function useHits(url: string | null, version: number): Hits | null {
  const [again, setAgain] = useState(0);
  const hits = useResource<Hits>(url, version + again).data;
  useEffect(() => {
    if (!hits?.at_most || hits.stopped) return;
    const timer = setTimeout(() => {
      forgetMatching((known) => known === url);
      setAgain(again + 1);
    }, VERIFYING_MS);
    return () => clearTimeout(timer);
  }, [hits]);
  return hits;
}

/** @param props.onPoint when the pointer rests on a step */
export function Scrubber({ onPoint }: { onPoint: (step: number) => void }) {
  const t = useText();
  const run = useRun();
  const step = useStep();
  const series = useSeries(run.run);
  const diagnosis = useDiagnosis(run.run);
  const { view, query } = useRoute();
  const { q, regex, filter } = query;
  const asked = { split: splitOf(query), q, regex, filter };
  const searching = view === "responses" && q ? address(`runs/${run.run}/hits`, asked) : null;
  const hits = useHits(searching, useVersion(run.run));
  if (view === "compare" || series?.step.length === 0) return null;
  if (!series) return <div class="scrubber waiting" />;
  return (
    <section class="scrubber" aria-label={t("step")}>
      <div class="moves">
        <button
          type="button"
          class="quiet"
          title={t("previousStep")}
          aria-label={t("previousStep")}
          onClick={() => moveStep(-1)}
        >
          ‹
        </button>
        <button
          type="button"
          class="quiet"
          title={t("nextStep")}
          aria-label={t("nextStep")}
          onClick={() => moveStep(1)}
        >
          ›
        </button>
        <button
          type="button"
          class={query["step"] === undefined ? "quiet on" : "quiet"}
          title={t("followNewest")}
          aria-label={t("followNewest")}
          aria-pressed={query["step"] === undefined}
          onClick={() => selectStep(undefined)}
        >
          »
        </button>
      </div>
      <Timeline
        series={series}
        step={step}
        diagnosis={diagnosis}
        hits={searching ? hits : null}
        onStep={selectStep}
        onPoint={onPoint}
      />
    </section>
  );
}
