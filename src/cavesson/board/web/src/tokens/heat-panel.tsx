/** Where in the responses a metric moves over the run. */

import { useMemo } from "preact/hooks";
import { address } from "../api/client";
import { useResource } from "../api/resource";
import type { Heat } from "../api/types";
import { HeatChart } from "../charts/heat";
import { useText } from "../i18n";
import { type Scale, scaleOf } from "../maths/colour";
import { available, TOKEN_METRICS } from "../maths/metrics";
import { Problem } from "../parts/failure";
import { titled } from "../parts/held-out";
import { selectStep, useRun, useStep, useVersion } from "../state/board";
import { patchRoute, useRoute } from "../state/router";
import type { Split } from "../state/selection";

const BUCKETS = 100;
/** Follow from whole responses and γ; the roll-ups are of single tokens. */
const WHOLE = ["return_to_go", "monte_carlo_error"];

interface Props {
  run: string;
  /** of the response that is shown */
  split: Split;
  metric: string;
  /** asked for at once, it is drawn after the text */
  shown: boolean;
}

export function HeatPanel({ run, split, metric, shown }: Props) {
  const t = useText();
  const step = useStep();
  const { query } = useRoute();
  const measured = useRun().columns.tokens;
  const columns = available(measured)
    .map(({ key }) => key)
    .filter((name) => !WHOLE.includes(name));
  const wanted = query["heat"] ?? metric;
  const column = columns.includes(wanted) ? wanted : columns[0];
  const url = column === undefined ? null : address(`runs/${run}/heat`, { split, column, buckets: BUCKETS });
  const { data, error } = useResource<Heat>(url, useVersion(run));
  const kind = TOKEN_METRICS.find(({ key }) => key === column)?.kind;
  // Of a chart that nobody has scrolled to, nothing is computed.
  const scale = useMemo(() => {
    let known: Scale | undefined;
    return (): Scale =>
      (known ??= scaleOf(
        kind!,
        data!.mean.flat().map((value) => value ?? NaN),
      ));
  }, [data, kind]);
  if (error) return <Problem text={error} />;
  if (!shown || !data || column === undefined) return null;
  return (
    <HeatChart
      title={titled(t("heatTitle", { name: column }), split, t)}
      hint={t("heatHint")}
      heat={data}
      scale={scale}
      step={step}
      onStep={selectStep}
      actions={
        <select
          value={column}
          aria-label={t("column")}
          onChange={(event) => patchRoute({ heat: event.currentTarget.value }, true)}
        >
          {columns.map((name) => (
            <option key={name} value={name}>
              {name}
            </option>
          ))}
        </select>
      }
    />
  );
}
