/** The tools of a step: calls, errors, seconds, and the rewards of rollouts with and without them. */

import { address } from "../api/client";
import { useResource } from "../api/resource";
import type { ToolUse } from "../api/types";
import { useText } from "../i18n";
import { number, percent, whole } from "../maths/format";
import { visible } from "../maths/text";
import { useRun, useVersion } from "../state/board";
import { go, useRoute } from "../state/router";
import { showing, splitOf } from "../state/selection";
import { Card } from "./card";
import { Problem } from "./failure";

interface Answer {
  rollouts: number;
  turns: number | null;
  tools: ToolUse[];
}

export function ToolTable({ step }: { step: number }) {
  const t = useText();
  const run = useRun();
  const split = splitOf(useRoute().query);
  const known = run.columns.rows.includes("turns");
  const url = known ? address(`runs/${run.run}/tools`, { split, step }) : null;
  const { data, error } = useResource<Answer>(url, useVersion(run.run));
  if (error) return <Problem text={error} />;
  if (!data?.rollouts) return null;
  const show = ({ name }: ToolUse): void => {
    const filter = name === "" ? "tool is None" : `tool == ${JSON.stringify(name)}`;
    go("responses", { run: run.run, step: String(step), ...showing(split), scope: "step", filter });
  };
  return (
    <Card title={t("toolsOfStep")} hint={t("toolsHint")}>
      <p class="muted">{t("turnsPerEpisode", { turns: number(data.turns, 3) })}</p>
      {data.tools.length === 0 ? <p class="muted">{t("noCalls")}</p> : <Table tools={data.tools} onShow={show} />}
    </Card>
  );
}

function Table({ tools, onShow }: { tools: ToolUse[]; onShow: (tool: ToolUse) => void }) {
  const t = useText();
  const heads = ["calls", "failed", "meanSeconds", "slowestCall", "rollouts", "rewardWith", "rewardWithout"] as const;
  return (
    <table class="plain tools">
      <thead>
        <tr>
          <th>{t("roleTool")}</th>
          {heads.map((head) => (
            <th key={head} class="number">
              {t(head)}
            </th>
          ))}
          <th>{t("usualError")}</th>
        </tr>
      </thead>
      <tbody>
        {tools.map((tool) => (
          <tr key={tool.name} class="click" onClick={() => onShow(tool)}>
            <td>{tool.name === "" ? "–" : <code>{visible(tool.name)}</code>}</td>
            <td class="number">{whole(tool.calls)}</td>
            <td class={`number ${tool.errors > 0 ? "bad" : ""}`}>
              {whole(tool.errors)}
              {tool.errors > 0 && ` (${percent(tool.errors / tool.calls, 0)})`}
            </td>
            <td class="number">{number(tool.seconds, 3)}</td>
            <td class="number">{number(tool.slowest, 3)}</td>
            <td class="number">{whole(tool.rollouts)}</td>
            <td class="number">{number(tool.reward_with, 3)}</td>
            <td class="number">{number(tool.reward_without, 3)}</td>
            <td class="words">{visible(tool.usual_error ?? "")}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
