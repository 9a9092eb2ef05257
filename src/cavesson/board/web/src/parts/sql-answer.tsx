/** The answer to a query: a chart of it, and a table that can be sorted, copied and saved. */

import { useMemo } from "preact/hooks";
import type { RunSummary, SqlAnswer } from "../api/types";
import { BarChart } from "../charts/bars";
import { LineChart } from "../charts/line-chart";
import { curveColour, type LineSpec } from "../charts/line-spec";
import { usePalette } from "../charts/palette";
import { useText } from "../i18n";
import {
  barsOf,
  type Choice,
  curvesOf,
  type Drawn,
  drawnAs,
  isNumber,
  type Kind,
  KINDS,
  MAX_BARS,
  rolloutOf,
  sortedBy,
  written,
} from "../maths/answer";
import { csv } from "../maths/csv";
import { number, whole } from "../maths/format";
import { beginning, oneLine } from "../maths/text";
import { selectStep, tokensRoute, useStep } from "../state/board";
import { patchRoute, useRoute } from "../state/router";
import { parseZoom } from "../views/overview";
import { Card } from "./card";
import { CopyButton } from "./copy-button";
import { Link } from "./link";
import { Pages } from "./pages";
import { SaveTable } from "./save-table";
import { Segments } from "./segments";

/** Lines on a page of the table, and characters of a cell. */
const PAGE = 100;
const SHOWN = 300;

interface Props {
  run: RunSummary;
  answer: SqlAnswer;
  /** lines that the server gives at most */
  most: number;
}

export function SqlAnswerPart({ run, answer, most }: Props) {
  const t = useText();
  const { query } = useRoute();
  const offset = Number(query["offset"] ?? 0);
  const rows = useMemo(() => sortedBy(answer.rows, query["sort"]), [answer, query["sort"]]);
  const table = (): unknown[][] => [answer.columns, ...rows];
  const actions = (
    <span class="saves">
      <CopyButton text={() => csv(table())} label={t("copyCsv")} title={t("copyCsvHint")} />
      <SaveTable name={`${run.name} SQL`} rows={table} />
    </span>
  );
  return (
    <>
      <AnswerChart answer={answer} />
      <Card title={t("answerOf", { run: run.name })} level={2} class="answer-table" actions={actions}>
        <p class="muted" role="status">
          {t("answerCount", { count: whole(answer.rows.length), seconds: number(answer.seconds, 2) })}
          {answer.truncated && <b class="warning"> {t("answerCut", { count: whole(answer.rows.length) })}</b>}{" "}
          {answer.truncated && answer.rows.length < most && (
            <button type="button" onClick={() => patchRoute({ limit: most })}>
              {t("showUpTo", { count: whole(most) })}
            </button>
          )}
        </p>
        {answer.rows.length === 0 ? (
          <p class="empty">{t("noLines")}</p>
        ) : (
          <Lines run={run.run} answer={answer} rows={rows.slice(offset, offset + PAGE)} />
        )}
        <Pages name="offset" offset={offset} size={PAGE} total={rows.length} />
      </Card>
    </>
  );
}

function Lines({ run, answer, rows }: { run: string; answer: SqlAnswer; rows: unknown[][] }) {
  const t = useText();
  const sort = useRoute().query["sort"] ?? "";
  const next = (column: number): string => (sort === `${column}` ? `-${column}` : `${column}`);
  return (
    <div class="scrolls" tabIndex={0} role="region" aria-label={t("answerTable")}>
      <table class="plain">
        <thead>
          <tr>
            {answer.columns.map((name, i) => {
              const order = sort === `${i + 1}` ? "ascending" : sort === `-${i + 1}` ? "descending" : undefined;
              return (
                <th key={i} class={isNumber(answer, i) ? "number" : ""} aria-sort={order}>
                  <button
                    type="button"
                    class="quiet"
                    onClick={() => patchRoute({ sort: next(i + 1), offset: undefined }, true)}
                  >
                    {name} {order && (order === "descending" ? "↓" : "↑")}
                  </button>
                </th>
              );
            })}
          </tr>
        </thead>
        <tbody>
          {rows.map((row, at) => (
            <Line key={at} run={run} answer={answer} row={row} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Line({ run, answer, row }: { run: string; answer: SqlAnswer; row: unknown[] }) {
  const t = useText();
  const place = rolloutOf(answer, row);
  return (
    <tr>
      {row.map((value, i) => {
        const isKey = place !== null && ["step", "sample"].includes(answer.columns[i]!);
        const text = typeof value === "number" ? exact(value) : oneLine(beginning(written(value), SHOWN));
        return (
          <td key={i} class={isNumber(answer, i) ? "number" : "words"}>
            {isKey ? (
              <Link to={tokensRoute(run, place.step, place.sample)} title={t("keyOpen")}>
                {text}
              </Link>
            ) : (
              text
            )}
          </td>
        );
      })}
    </tr>
  );
}

/** A whole number as the record has it, without commas, as a filter or a query takes it; others are rounded. */
const exact = (value: number): string => (Number.isInteger(value) ? String(value).replace("-", "−") : number(value, 6));

function AnswerChart({ answer }: { answer: SqlAnswer }) {
  const t = useText();
  const { query } = useRoute();
  const choice: Choice = {
    kind: KINDS.find((one) => one === query["chart"]),
    across: placeOf(query["across"], answer),
    value: placeOf(query["value"], answer),
  };
  const key = JSON.stringify(choice);
  const drawn = useMemo(() => drawnAs(answer, choice), [answer, key]);
  const numbers = answer.columns.map((_, i) => i).filter((i) => isNumber(answer, i));
  if (answer.rows.length === 0 || numbers.length === 0) return null;
  const kinds = { line: t("chartLine"), bars: t("chartBars"), none: t("chartNone") };
  return (
    <>
      <div class="bar">
        <Segments
          options={kinds}
          chosen={drawn.kind}
          onChoose={(kind: Kind) => patchRoute({ chart: kind, x: undefined }, true)}
        />
        {drawn.kind !== "none" && (
          <>
            <Column
              name="across"
              label={t("across")}
              chosen={drawn.across}
              answer={answer}
              options={answer.columns.map((_, i) => i)}
            />
            <Column name="value" label={t("values")} chosen={choice.value} answer={answer} options={numbers} />
          </>
        )}
      </div>
      {drawn.kind === "line" && <Curves answer={answer} drawn={drawn} />}
      {drawn.kind === "bars" && <BarsOf answer={answer} drawn={drawn} />}
    </>
  );
}

/** A column's place from 0, as the address has it from 1. */
function placeOf(text: string | undefined, { columns }: SqlAnswer): number | undefined {
  const place = Number(text) - 1;
  return columns[place] === undefined ? undefined : place;
}

interface ColumnProps {
  name: "across" | "value";
  label: string;
  /** undefined: those that are drawn without a choice */
  chosen: number | undefined;
  answer: SqlAnswer;
  options: number[];
}

function Column({ name, label, chosen, answer, options }: ColumnProps) {
  const t = useText();
  return (
    <label>
      {label}
      <select
        value={chosen === undefined ? "" : String(chosen + 1)}
        onChange={(event) => patchRoute({ [name]: event.currentTarget.value, x: undefined }, true)}
      >
        {name === "value" && <option value="">{t("automatic")}</option>}
        {options.map((i) => (
          <option key={i} value={String(i + 1)}>
            {answer.columns[i]}
          </option>
        ))}
      </select>
    </label>
  );
}

interface ChartProps {
  answer: SqlAnswer;
  drawn: Drawn;
}

/** What a chart is called: its values, and what they are drawn along. */
const titleOf = ({ columns }: SqlAnswer, { values, across }: Drawn): string =>
  `${values.map((i) => columns[i]).join(", ")} · ${columns[across]}`;

function Curves({ answer, drawn }: ChartProps) {
  const t = useText();
  const colours = usePalette();
  const step = useStep();
  const { query } = useRoute();
  const { x, curves, total } = useMemo(() => curvesOf(answer, drawn), [answer, drawn]);
  const counts = x.every(Number.isInteger); // the ends of a zoom are whole numbers
  const spec = useMemo(
    (): LineSpec => ({
      title: titleOf(answer, drawn),
      x,
      curves: curves.map((curve, i) => ({ ...curve, colour: curveColour(colours, i) })),
      bands: [],
      log: false,
      ...(counts ? {} : { unit: answer.columns[drawn.across]! }),
    }),
    [answer, drawn, colours],
  );
  const isStep = answer.columns[drawn.across] === "step";
  return (
    <LineChart
      spec={spec}
      height={240}
      step={isStep ? step : (x.at(-1) ?? 0)}
      zoom={counts ? parseZoom(query["x"]) : null}
      onStep={(at) => isStep && selectStep(at)}
      onZoom={(range) => counts && patchRoute({ x: range ? `${range[0]}-${range[1]}` : undefined }, true)}
    >
      {total > curves.length && <p class="muted">{t("shownOf", { shown: curves.length, total: whole(total) })}</p>}
    </LineChart>
  );
}

function BarsOf({ answer, drawn }: ChartProps) {
  const t = useText();
  const bars = useMemo(() => barsOf(answer, drawn), [answer, drawn]);
  const { length } = answer.rows;
  const note = length > MAX_BARS ? t("shownOf", { shown: MAX_BARS, total: whole(length) }) : null;
  return <BarChart title={titleOf(answer, drawn)} bars={bars} note={note} />;
}
