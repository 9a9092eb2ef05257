/** The responses to each prompt of the step side by side; groups of equal rewards teach nothing and are marked. */

import { useMemo } from "preact/hooks";
import { address } from "../api/client";
import { useResource } from "../api/resource";
import type { Group, Progress } from "../api/types";
import { useText } from "../i18n";
import { number, whole } from "../maths/format";
import { gist } from "../maths/prompt";
import { oneLine, visible } from "../maths/text";
import { useRun, useVersion } from "../state/board";
import { patchRoute, useRoute } from "../state/router";
import { splitOf } from "../state/selection";
import { useKeys } from "../state/keys";
import { Problem } from "./failure";
import { GroupReader } from "./group-reader";
import { Pages } from "./pages";
import { LeftOut, Partial } from "./partial";
import { PromptLink } from "./prompt-link";
import { openTokens } from "./rollout-line";
import { Segments } from "./segments";

const PAGE = 10;
const ORDERS = ["-sd", "sd", "-mean", "mean"] as const;

interface Answer {
  total: number;
  left_out?: number;
  partial?: Progress | null;
  groups: Group[];
}

export function Groups({ step }: { step: number }) {
  const t = useText();
  const run = useRun();
  const { query } = useRoute();
  const order = ORDERS.find((one) => one === query["groups"]) ?? "-sd";
  const offset = Number(query["from"] ?? 0);
  const url = address(`runs/${run.run}/groups`, { split: splitOf(query), step, sort: order, offset, limit: PAGE });
  const { data, error } = useResource<Answer>(url, useVersion(run.run));
  const siblings = data?.groups.some((group) => group.n > 1);
  // Drawn anew only with another answer. Groups have no keys: their elements take the next step's texts.
  const read = query["read"];
  const shown = useMemo(
    () => data?.groups.map((group) => <OneGroup run={run.run} group={group} read={isRead(group, read)} />),
    [data, read],
  );
  useKeys({ j: () => focusGroup(1), k: () => focusGroup(-1) });
  if (error) return <Problem text={error} />;
  if (data?.total === 0)
    return (
      <>
        <Partial of={data.partial} />
        <LeftOut count={data.left_out ?? 0} split={splitOf(query)} />
      </>
    );
  if (!data || (!siblings && offset === 0)) return null;
  const names = { "-sd": t("mostSpread"), sd: t("leastSpread"), "-mean": t("highestMean"), mean: t("lowestMean") };
  const flat = data.groups.filter((group) => group.zero_variance).length;
  return (
    <section>
      <div class="section">
        <h2>{t("groups")}</h2>
        <span class="muted">
          {t("groupCount", { total: whole(data.total) })}
          {flat > 0 && ` · ${t("flatGroups", { count: flat })}`}
        </span>
        <span class="space" />
        <Segments
          options={names}
          chosen={order}
          onChoose={(key) => patchRoute({ groups: key, from: undefined }, true)}
        />
      </div>
      <Partial of={data.partial} />
      {shown}
      <Pages name="from" offset={offset} size={PAGE} total={data.total} />
    </section>
  );
}

/** Whether a group is the one that the address opens, which names one of its responses. */
const isRead = (group: Group, sample: string | undefined): boolean =>
  sample !== undefined && group.samples.includes(Number(sample));

/** Moves the focus to the button that opens the next or the previous group. */
function focusGroup(by: number): void {
  const buttons = [...document.querySelectorAll<HTMLButtonElement>(".group .read")];
  const now = buttons.findIndex((button) => button === document.activeElement);
  buttons[now < 0 ? 0 : Math.min(buttons.length - 1, Math.max(0, now + by))]?.focus();
}

function OneGroup({ run, group, read }: { run: string; group: Group; read: boolean }) {
  const t = useText();
  const best = Math.max(...group.rows.map((row) => row.reward ?? -Infinity));
  return (
    <article class={`group ${group.zero_variance ? "flat" : ""}`}>
      <header>
        <PromptLink run={run} id={group.prompt_id} class="line">
          {oneLine(gist(group.prompt))}
        </PromptLink>
        {group.zero_variance && (
          <span class="tag" title={t("flatHint")}>
            {t("flat")}
          </span>
        )}
        <span class="muted number">
          {t("mean")} {number(group.mean, 3)} ± {number(group.sd, 2)}
          {group.unscored > 0 && ` · ${t("unscored", { count: whole(group.unscored), total: whole(group.n) })}`}
        </span>
        <button
          type="button"
          class={read ? "read on" : "read"}
          aria-expanded={read}
          onClick={() => patchRoute({ read: read ? undefined : group.samples[0], against: undefined }, true)}
        >
          {t(read ? "close" : "readGroup")}
        </button>
      </header>
      {read && <GroupReader run={run} step={group.rows[0]!.step} sample={group.samples[0]!} />}
      <div class="siblings" hidden={read}>
        {group.rows.map(({ step, sample, reward, response }) => (
          <button
            type="button"
            class={reward === best && !group.zero_variance ? "best" : ""}
            onClick={() => openTokens(run, step, sample)}
          >
            <b>{number(reward, 3)}</b>
            <span class="text">{visible(response)}</span>
          </button>
        ))}
      </div>
    </article>
  );
}
