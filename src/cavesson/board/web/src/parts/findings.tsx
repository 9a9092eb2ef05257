/** What the doctor could not judge, and what it found; one of the findings can be open, with what is known of its kind. */

import { address } from "../api/client";
import { useResource } from "../api/resource";
import type { Diagnosis, DiagnosisPages } from "../api/types";
import { useText } from "../i18n";
import { stepsOf } from "../maths/findings";
import { useKeys } from "../state/keys";
import { patchRoute, useRoute } from "../state/router";
import { FindingItem } from "./finding";

export function Findings({ run, diagnosis }: { run: string; diagnosis: Diagnosis }) {
  const t = useText();
  const { summary, findings } = diagnosis;
  const { finding: open } = useRoute().query;
  // Those of all findings at once, so that a saved page has them.
  const rules = findings.map(({ rule }) => rule).join();
  const pages = useResource<DiagnosisPages>(rules ? address("diagnosis", { rules }) : null).data ?? {};
  useKeys(open === undefined ? {} : { Escape: () => patchRoute({ finding: undefined, about: undefined }, true) });
  if (findings.length === 0 && !summary) return null;
  return (
    <section class="card findings" aria-label={t("findings")}>
      <header>
        <h2>{t("findings")}</h2>
        <span class="muted">{findings.length}</span>
      </header>
      {summary && <p class="judged">{summary}</p>}
      <NotExcluded failures={diagnosis.not_excluded} />
      <ul>
        {findings.map((finding, i) => (
          <FindingItem
            key={finding.rule}
            run={run}
            finding={finding}
            steps={stepsOf(finding, diagnosis)}
            open={finding.rule === open}
            full={finding.rule === open || (open === undefined && i === 0)}
            pages={pages}
          />
        ))}
      </ul>
    </section>
  );
}

/** Failures that the run may have although nothing shows them, and what would exclude them. */
function NotExcluded({ failures }: { failures: Diagnosis["not_excluded"] }) {
  const t = useText();
  if (failures.length === 0) return null;
  return (
    <details class="open-failures">
      <summary class="muted">
        {t("notExcluded")} ({failures.length})
      </summary>
      <dl>
        {failures.map(([failure, lacking]) => (
          <div key={failure}>
            <dt>{failure}</dt>
            <dd class="muted">{lacking}</dd>
          </div>
        ))}
      </dl>
    </details>
  );
}
