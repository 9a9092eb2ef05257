/** What sets the selected responses apart from the rest: one line, and on demand curves, shares and words. */

import { useEffect, useState } from "preact/hooks";
import { address } from "../api/client";
import { useResource } from "../api/resource";
import { inSnapshot } from "../api/snapshot";
import type { ColumnStatistics, SelectionDetails, SelectionStatistics, Share } from "../api/types";
import { Two } from "../charts/spark";
import { useText } from "../i18n";
import { number, percent, signed, whole } from "../maths/format";
import { oneLine, visible } from "../maths/text";
import { patchRoute, useRoute } from "../state/router";
import type { RowPages } from "../state/rows";
import type { Selection } from "../state/selection";
import { Problem } from "./failure";

interface Props {
  run: string;
  rows: Selection;
  pages: RowPages;
  version: number;
}

/** Nothing is asked for while the selection changes: the table comes first. */
const REST_MS = 400;

export function Statistics({ run, rows, pages, version }: Props) {
  const { sort: _, ...selected } = rows;
  const some = [rows.q, rows.filter, rows.starred].some((one) => one !== undefined && one !== "");
  const there = some && !pages.loading && pages.error === null && pages.total > 0 && pages.most === pages.total;
  if (!there) return null;
  return <Compared key={JSON.stringify(selected)} run={run} selected={selected} version={version} />;
}

function Compared({ run, selected, version }: { run: string; selected: Selection; version: number }) {
  const t = useText();
  const open = useRoute().query["statistics"] === "1";
  const [rested, setRested] = useState(inSnapshot);
  useEffect(() => {
    const timer = setTimeout(() => setRested(true), REST_MS);
    return () => clearTimeout(timer);
  }, []);
  const path = `runs/${run}/statistics`;
  const { data, error } = useResource<SelectionStatistics>(rested ? address(path, selected) : null, version);
  if (error) return <Problem text={error} />;
  if (!data || data.rest === 0) return null;
  const columns = Object.entries(data.columns);
  return (
    <details class="statistics pad" open={open}>
      <summary
        title={t("statisticsHint")}
        onClick={(event) => {
          event.preventDefault();
          patchRoute({ statistics: open ? undefined : 1 }, true);
        }}
      >
        <span class="muted">{t("comparedWithRest", { count: whole(data.rest) })}</span>
        {columns.map(([name, line]) => (
          <span key={name}>
            {name} <b>{number(line.selected, 3)}</b> <Difference of={line.difference} />
          </span>
        ))}
      </summary>
      {open && <Details url={address(path, { ...selected, details: 1 })} version={version} />}
    </details>
  );
}

/** Curves, shares, and words, for which texts have to be read. */
function Details({ url, version }: { url: string; version: number }) {
  const t = useText();
  const { data, error } = useResource<SelectionDetails>(url, version);
  if (error) return <Problem text={error} />;
  if (!data) return null;
  return (
    <div class="two">
      <div>
        {Object.entries(data.columns).map(([name, line]) => (
          <p key={name} class="compared-curve">
            <span>
              {name} <b>{number(line.selected, 3)}</b>{" "}
              <span class="muted">{t("restMean", { value: number(line.rest, 3) })}</span>
            </span>
            <Two first={data.curves[name]!.selected} second={data.curves[name]!.rest} label={t("curvesOf", { name })} />
          </p>
        ))}
      </div>
      <div>
        <Shares title={t("finish")} shares={data.finish_reasons} />
        <Shares title={t("comparedTools")} shares={data.tools} />
        <Shares title={t("wordsOf", { count: whole(data.sampled) })} shares={data.words} />
      </div>
    </div>
  );
}

/** A difference with its interval; grey unless the interval leaves out zero. */
function Difference({ of, share = false }: { of: ColumnStatistics["difference"]; share?: boolean }) {
  if (!of) return null;
  const [mean, low, high] = of;
  const text = (value: number): string => (share ? `${value > 0 ? "+" : ""}${percent(value)}` : signed(value));
  const known = low !== null && high !== null;
  const sure = known && (low > 0 || high < 0);
  return (
    <span class={sure ? "" : "muted"}>
      {text(mean)}
      {known && ` [${text(low)}, ${text(high)}]`}
    </span>
  );
}

function Shares({ title, shares }: { title: string; shares: Share[] }) {
  const t = useText();
  if (shares.length === 0) return null;
  return (
    <table class="plain">
      <thead>
        <tr>
          <th>{title}</th>
          <th class="number">{t("selected")}</th>
          <th class="number">{t("rest")}</th>
          <th class="number">{t("differenceToRest")}</th>
        </tr>
      </thead>
      <tbody>
        {shares.map((one) => (
          <tr key={one.name}>
            <td>{oneLine(visible(one.name || "?"))}</td>
            <td
              class="number"
              title={one.interval ? `${percent(one.interval[0])} – ${percent(one.interval[1])}` : undefined}
            >
              {percent(one.selected)}
            </td>
            <td class="number">{percent(one.rest)}</td>
            <td class="number">
              <Difference of={one.difference} share />
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
