/** What the doctor found: each finding leads to its first step and to the rollouts that show it. */

import type { Finding, Steps } from "../api/types";
import { type Translate, useText } from "../i18n";
import { visible } from "../maths/text";
import { selectStep } from "../state/board";
import { openTokens } from "./rollout-line";

/** So many rollouts are linked from one finding. */
const MOST = 12;

export function Findings({ run, findings }: { run: number; findings: Finding[] }) {
  const t = useText();
  if (findings.length === 0) return null;
  return (
    <section class="card findings" aria-label={t("findings")}>
      <header>
        <h3>{t("findings")}</h3>
        <span class="muted">{findings.length}</span>
      </header>
      <ul>
        {findings.map((finding) => (
          <One key={finding.id} run={run} finding={finding} />
        ))}
      </ul>
    </section>
  );
}

function One({ run, finding }: { run: number; finding: Finding }) {
  const t = useText();
  const { severity, title, text, steps, between, rollouts } = finding;
  const kind = t(`severity_${severity}`);
  return (
    <li>
      <i class={`severity ${severity}`} role="img" aria-label={kind} title={kind} />
      <b>{visible(title)}</b>
      {steps && (
        <button type="button" class="quiet" onClick={() => selectStep(steps[0])}>
          {stepsNamed(t, steps)}
        </button>
      )}
      {between && (
        <span class="muted" title={t("onsetHint")}>
          {t(between[0] === between[1] ? "onsetAt" : "onsetBetween", { first: between[0], last: between[1] })}
        </span>
      )}
      <p class="muted">{visible(text)}</p>
      <Details finding={finding} />
      {rollouts.length > 0 && (
        <span class="chips">
          {rollouts.slice(0, MOST).map(({ step, sample, token }) => (
            <button key={`${step}.${sample}`} type="button" onClick={() => openTokens(run, step, sample, token)}>
              {t("stepNumber", { step })} · {t("sampleNumber", { sample })}
            </button>
          ))}
        </span>
      )}
    </li>
  );
}

/** The number seen against the healthy range, what to change, what follows from it, and who says so. */
function Details({ finding }: { finding: Finding }) {
  const t = useText();
  const lines = {
    findingFix: finding.fix,
    findingExplains: finding.explains.join(", "),
    findingSource: finding.source,
  } as const;
  return (
    <details>
      <summary class="muted">
        {t("findingSeen")} {finding.seen} ({visible(finding.healthy)})
      </summary>
      <dl>
        {(Object.keys(lines) as (keyof typeof lines)[]).map(
          (key) =>
            lines[key] && (
              <div key={key}>
                <dt>{t(key)}</dt>
                <dd>{visible(lines[key])}</dd>
              </div>
            ),
        )}
      </dl>
    </details>
  );
}

function stepsNamed(t: Translate, [first, last]: Steps): string {
  return first === last ? t("stepNumber", { step: first }) : t("stepsNumber", { steps: `${first}–${last}` });
}
