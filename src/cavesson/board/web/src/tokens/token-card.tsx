/** Every number of the token looked at. */

import { useEffect, useState } from "preact/hooks";
import { type Tokens, whyNotLearned } from "../api/tokens";
import { useText } from "../i18n";
import { tint } from "../maths/colour";
import { number, whole } from "../maths/format";
import { visible } from "../maths/text";
import type { Unit } from "../maths/units";
import { usePalette } from "../charts/palette";
import { type Store, useStore } from "../state/store";
import type { Looked, Measured } from "./measured";

interface Props {
  loaded: Tokens;
  measured: Measured[];
  looked: Store<Looked>;
}

export function TokenCard({ loaded, measured, looked }: Props) {
  const t = useText();
  const state = useStore(looked);
  const token = state.token ?? state.pinned;
  const unit = token === null ? undefined : loaded.units[loaded.unitOf[token]!];
  if (token === null || !unit)
    return (
      <aside class="token-card card">
        <p class="muted">{t("pointAtToken")}</p>
        <Totals measured={measured} />
      </aside>
    );
  const why = whyNotLearned(loaded, token);
  const id = loaded.columns["token_id"]?.[token];
  return (
    <aside class="token-card card">
      <div class="glyph">
        <bdi>{quoted(unit.text)}</bdi>
      </div>
      <p class="muted">
        {t("tokenPlace", { place: whole(token), count: whole(loaded.count) })}
        {id !== undefined && id >= 0 && ` · id ${id}`}
        {why && ` · ${t("notLearned")}`}
      </p>
      {why && <p class="why">{t(why)}</p>}
      {unit.count > 1 && <p class="warning">{t("severalTokens", { count: unit.count })}</p>}
      <Values measured={measured} unit={unit} />
    </aside>
  );
}

/** A column for each token of the character. */
function Values({ measured, unit }: { measured: Measured[]; unit: Unit }) {
  const t = useText();
  const colours = usePalette();
  const tokens = Array.from({ length: unit.count }, (_, i) => unit.first + i);
  const colour = ({ scale, values }: Measured, token: number): string =>
    tint(scale, values[token]!, colours.hues) ?? "transparent";
  return (
    <table class="plain">
      <tbody>
        {measured.map((one) => (
          <tr key={one.metric.key}>
            <td title={t(`metric_${one.metric.key}` as "metric_kl_k1")}>{one.metric.key}</td>
            {tokens.map((token) => (
              <td key={token} class="number" style={{ backgroundColor: colour(one, token) }}>
                {number(one.values[token])}
              </td>
            ))}
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** A blank, a newline or nothing at all has to be seen too. */
function quoted(text: string): string {
  return `“${visible(text.slice(0, 200)).replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "·")}”`;
}

/** Metrics whose sum over the response means something. */
const ADDS_UP = new Set([
  "kl_k1",
  "logprob",
  "ref_logprob",
  "teacher_kl",
  "teacher_logprob",
  "token_reward",
  "sampler_gap",
]);

/** From so many tokens on, sums take long enough to be felt. */
const LONG = 4000;

function Totals({ measured }: { measured: Measured[] }) {
  const t = useText();
  const [ready, setReady] = useState((measured[0]?.values.length ?? 0) < LONG ? measured.length : 0);
  // The text comes first; sums over a long response follow it one by one.
  useEffect(() => {
    if (ready === measured.length) return;
    const timer = setTimeout(() => setReady(ready + 1), 20);
    return () => clearTimeout(timer);
  }, [ready]);
  return (
    <table class="plain">
      <thead>
        <tr>
          <td />
          <th class="number">{t("sum")}</th>
          <th class="number">{t("mean")}</th>
        </tr>
      </thead>
      <tbody>
        {measured.map((one, i) => {
          const { key } = one.metric;
          const { sum, count } = i < ready ? summed(one.values) : { sum: 0, count: 0 };
          return (
            <tr key={key}>
              <td title={t(`metric_${key}` as "metric_kl_k1")}>{key}</td>
              <td class="number">{ADDS_UP.has(key) && count > 0 ? number(sum) : ""}</td>
              <td class="number">{number(count > 0 ? sum / count : null)}</td>
            </tr>
          );
        })}
      </tbody>
    </table>
  );
}

function summed(values: Float32Array): { sum: number; count: number } {
  let [sum, count] = [0, 0];
  for (const value of values) {
    if (Number.isNaN(value)) continue;
    sum += value;
    count++;
  }
  return { sum, count };
}
