/** One finding: what happened, an example before and since, all it is about, what to change, and its kind. */

import { useLayoutEffect, useRef } from "preact/hooks";
import type { DiagnosisPages, Example, Finding, Steps } from "../api/types";
import { type Translate, useText } from "../i18n";
import { number } from "../maths/format";
import { oneLine, visible } from "../maths/text";
import { selectStep } from "../state/board";
import { patched, type Query } from "../state/address";
import { type Route, SHOWN_VIEWS, useRoute } from "../state/router";
import { CopyButton } from "./copy-button";
import { DiagnosisPage } from "./diagnosis-page";
import { Link } from "./link";
import { openTokens } from "./rollout-line";

/** So many rollouts are linked from one finding. */
const MOST = 12;

interface Props {
  run: string;
  finding: Finding;
  steps: Steps | null;
  open: boolean;
  /** whether it is shown in full: the curves below have to be in sight too */
  full: boolean;
  pages: DiagnosisPages;
}

export function FindingItem({ run, finding, steps, open, full, pages }: Props) {
  const t = useText();
  const route = useRoute();
  const { rule, severity, title, cause, happened, since_between: between, evidence } = finding;
  const kind = t(`severity_${severity}`);
  const place = useRef<HTMLLIElement>(null);
  useLayoutEffect(() => void (open && place.current?.scrollIntoView({ block: "nearest" })), [open]);
  const query = patched(route.query, { run, finding: open ? undefined : rule, about: undefined });
  const own: Route = { view: "overview", query };
  return (
    <li ref={place} class={open ? "open" : ""}>
      <i class={`severity ${severity}`} role="img" aria-label={kind} title={kind} />
      <Link to={own} class="title" current={open}>
        <b>{visible(title)}</b>
      </Link>
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
      {happened && <p class="happened">{visible(happened)}</p>}
      {(full || !happened) && <p class="muted">{visible(cause)}</p>}
      {full && <Examples run={run} finding={finding} />}
      {full && <Change finding={finding} />}
      <span class="chips">
        <Link to={own}>{t(open ? "close" : "findingOpen")}</Link>
        <Affected run={run} finding={finding} />
        {(full ? evidence.slice(0, MOST) : []).map(({ step, sample, start }) => (
          <button key={`${step}.${sample}`} type="button" onClick={() => openTokens(run, step, sample, start)}>
            {t("stepNumber", { step })} · {t("sampleNumber", { sample })}
          </button>
        ))}
      </span>
      {full && <Details finding={finding} open={open} />}
      {open && <DiagnosisPage rule={rule} pages={pages} />}
    </li>
  );
}

/** A response before the finding began and one that shows it, as recorded; nothing where there is none with a text. */
function Examples({ run, finding: { before, after } }: { run: string; finding: Finding }) {
  const t = useText();
  if (!after) return null;
  const line = (label: string, { step, sample, reward, text }: Example) => (
    <button type="button" class="rollout" onClick={() => openTokens(run, step, sample)}>
      <span class="when muted">
        {label} · {t("stepNumber", { step })} · {t("reward")} {number(reward, 3)}
      </span>
      <span class="line">{oneLine(text) || <span class="muted">{t("emptyResponse")}</span>}</span>
    </button>
  );
  return (
    <div class="examples">
      {before ? line(t("exampleBefore"), before) : <p class="muted">{t("noExampleBefore")}</p>}
      {line(t("exampleAfter"), after)}
    </div>
  );
}

/** What to change: of a run of Cavesson as lines of its recipe and as flags, of others in the words of their trainer. */
function Change({ finding: { fix, change } }: { finding: Finding }) {
  const t = useText();
  if (!fix) return null;
  return (
    <div class="change">
      <span>
        <span class="muted">{t("findingFix")}</span> {visible(fix)}
      </span>
      {change?.toml ? (
        <>
          <pre class="code">{visible(change.toml)}</pre>
          <CopyButton label={t("copyToml")} title={t("copyTomlHint")} text={() => change.toml} />
          <CopyButton label={t("copyFlags")} title={change.flags} text={() => change.flags} />
        </>
      ) : (
        <CopyButton label={t("copyChange")} title={t("copyChange")} text={() => fix} />
      )}
    </div>
  );
}

/** All rollouts that a finding is about, in the table of responses, which a saved page may not have. */
function Affected({ run, finding: { affected } }: { run: string; finding: Finding }) {
  const t = useText();
  if (!affected || !SHOWN_VIEWS.includes("responses")) return null;
  const { steps, filter, search } = affected;
  const query: Query = patched({}, { run, steps: steps.join("-"), filter, q: search, regex: search && 1 });
  return (
    <Link to={{ view: "responses", query }}>
      {filter || search ? t("allAffected") : t("allSince", { steps: steps.join("–") })}
    </Link>
  );
}

/** The number seen against the healthy range, what the run's trainer calls the settings, what follows, and who says so. */
function Details({ finding, open }: { finding: Finding; open: boolean }) {
  const t = useText();
  const theirs = finding.trainer_setting_names;
  const lines = [
    theirs ? [t("findingInTrainer", { trainer: theirs.trainer }), namesOf(theirs.settings)] : ["", ""],
    [t("findingExplains"), finding.explains.join(", ")],
    [t("findingSource"), finding.source],
  ];
  return (
    <details open={open}>
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
