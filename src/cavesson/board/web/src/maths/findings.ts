/** The steps of a finding: it lasts to the end of what was examined. */

import type { Diagnosis, Finding, Steps } from "../api/types";

export function stepsOf({ since_step: since }: Finding, { last_step: last }: Diagnosis): Steps | null {
  return since === null ? null : [since, Math.max(last, since)];
}
