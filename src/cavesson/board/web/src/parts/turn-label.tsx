/** Who speaks in a turn, and of a call which tool, whether it failed, and how long it took. */

import type { Turn } from "../api/types";
import { type Key, useText } from "../i18n";
import { number } from "../maths/format";
import { visible } from "../maths/text";

/** Roles that have a name in every language. */
const ROLES: Record<string, Key> = {
  assistant: "roleAssistant",
  user: "roleUser",
  tool: "roleTool",
  system: "roleSystem",
};

export const isKnown = (role: string): boolean => Object.hasOwn(ROLES, role);

/** Which turn a part of a text is of, in a table. */
export function TurnName({ turn, role, name }: { turn: number; role: string; name: string | null }) {
  const t = useText();
  return (
    <span class="tool">
      {t("turnNumber", { turn })} {name ? visible(name) : isKnown(role) ? t(ROLES[role]!) : visible(role)}
    </span>
  );
}

export function TurnLabel({ turn }: { turn: Turn }) {
  const t = useText();
  const { role, name, error, seconds, reward } = turn;
  return (
    <>
      <b>{isKnown(role) ? t(ROLES[role]!) : visible(role)}</b>
      {name && <code>{visible(name)}</code>}
      {error && (
        <span class="tag bad" title={error}>
          {t("failed")}
        </span>
      )}
      <span class="space" />
      {reward != null && (
        <span class="number">
          {t("reward")} {number(reward)}
        </span>
      )}
      {seconds != null && <span class="muted number">{t("secondsCount", { seconds: number(seconds, 3) })}</span>}
    </>
  );
}
