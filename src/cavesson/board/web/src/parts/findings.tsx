/** What the doctor could not judge, and what it found: a finding leads to its first step and the rollouts that show it. */

import type { Diagnosis, Finding, Steps } from "../api/types";
import { type Translate, useText } from "../i18n";
import { stepsOf } from "../maths/findings";
import { visible } from "../maths/text";
import { selectStep } from "../state/board";
import { openTokens } from "./rollout-line";

/** So many rollouts are linked from one finding. */
const MOST = 12;

export function Findings({ run, diagnosis }: { run: string; diagnosis: Diagnosis }) {
  const t = useText();
  const { summary, findings } = diagnosis;
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
        {findings.map((finding) => (
          <FindingItem key={finding.rule} run={run} finding={finding} steps={stepsOf(finding, diagnosis)} />
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

function FindingItem({ run, finding, steps }: { run: string; finding: Finding; steps: Steps | null }) {
  const t = useText();
  const { severity, title, cause, since_between: between, evidence } = finding;
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
      <p class="muted">{visible(cause)}</p>
      <Details finding={finding} />
      {evidence.length > 0 && (
        <span class="chips">
          {evidence.slice(0, MOST).map(({ step, sample, start }) => (
            <button key={`${step}.${sample}`} type="button" onClick={() => openTokens(run, step, sample, start)}>
              {t("stepNumber", { step })} · {t("sampleNumber", { sample })}
            </button>
          ))}
        </span>
      )}
    </li>
  );
}

/** The number seen against the healthy range, what to change, also in the run's trainer, what follows, and who says so. */
function Details({ finding }: { finding: Finding }) {
  const t = useText();
  const theirs = finding.trainer_setting_names;
  const lines = [
    [t("findingFix"), finding.fix],
    theirs ? [t("findingInTrainer", { trainer: theirs.trainer }), namesOf(theirs.settings)] : ["", ""],
    [t("findingExplains"), finding.explains.join(", ")],
    [t("findingSource"), finding.source],
  ];
  return (
    <details>
      <summary class="muted">
        {t("findingSeen")} {finding.seen} ({visible(finding.healthy)})
      </summary>
      <dl>
        {lines.map(
          ([name, text]) =>
            text && (
              <div key={name}>
                <dt>{name}</dt>
                <dd>{visible(text)}</dd>
              </div>
            ),
        )}
      </dl>
    </details>
  );
}

function namesOf(settings: Record<string, string>): string {
  return Object.entries(settings)
    .map(([setting, name]) => `${setting} → ${name}`)
    .join("; ");
}

function stepsNamed(t: Translate, [first, last]: Steps): string {
  return first === last ? t("stepNumber", { step: first }) : t("stepsNumber", { steps: `${first}–${last}` });
}
