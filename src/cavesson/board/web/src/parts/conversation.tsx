/** An episode: its turns by who speaks, calls of tools with their results, and thinking and long results folded. */

import type { ComponentChildren } from "preact";
import type { Rollout, Turn } from "../api/types";
import { useText } from "../i18n";
import { argumentsOf, type Block, blocksOf, templated } from "../maths/conversation";
import { whole as wholeNumber } from "../maths/format";
import { visible } from "../maths/text";
import { useKeys } from "../state/keys";
import { Rendered } from "./rendered";
import { marked, Text } from "./text";
import { isKnown, TurnLabel } from "./turn-label";

/** A longer result is folded. */
const LONG = 600;

export const SHOWN = ["turns", "markdown", "text"] as const;
export type Shown = (typeof SHOWN)[number];

/** The turns of a rollout: those recorded, or else those of its response. */
export const turnsOf = ({ conversation, response }: Rollout): Turn[] =>
  conversation?.length ? conversation : answered(response);

/** The turns that marks in a response tell apart; one of the assistant if it has none. */
export const answered = (response: string): Turn[] =>
  templated(response, "assistant") ?? [{ role: "assistant", text: response }];

interface Props {
  turns: Turn[];
  search?: string;
  markdown?: boolean;
  muted?: boolean;
}

export function Conversation({ turns, search = "", markdown = false, muted = false }: Props) {
  const alone = turns.length === 1 && turns[0]!.role === "assistant";
  if (alone) return <Said text={turns[0]!.text ?? ""} search={search} markdown={markdown} muted={muted} written />;
  return (
    <div class="conversation">
      {turns.map((turn, i) => (
        <OneTurn key={i} turn={turn} search={search} markdown={markdown} muted={muted} recorded={hasCalls(turns)} />
      ))}
    </div>
  );
}

/** Whether the calls have turns of their own, and need not be read out of what the assistant wrote. */
const hasCalls = (turns: Turn[]): boolean => turns.some(({ arguments: given }) => given != null);

interface TurnProps {
  turn: Turn;
  search: string;
  markdown: boolean;
  muted: boolean;
  recorded: boolean;
}

function OneTurn({ turn, search, markdown, muted, recorded }: TurnProps) {
  const t = useText();
  const { role, error } = turn;
  if (role === "system")
    return (
      <Folded label={t("systemPrompt")} text={turn.text ?? ""} search={search}>
        <Text text={turn.text ?? ""} search={search} muted />
      </Folded>
    );
  return (
    <article class={`turn ${isKnown(role) ? role : ""} ${error ? "failed" : ""}`}>
      <header>
        <TurnLabel turn={turn} />
      </header>
      {role === "tool" ? (
        <Call turn={turn} search={search} />
      ) : turn.thinking ? (
        <Folded label={t("thinking")} text={turn.text ?? ""} search={search}>
          <Text text={turn.text ?? ""} search={search} muted />
        </Folded>
      ) : (
        <Said text={turn.text ?? ""} search={search} markdown={markdown} muted={muted} written={!recorded} />
      )}
    </article>
  );
}

function Call({ turn, search }: { turn: Turn; search: string }) {
  const t = useText();
  const text = turn.text ?? "";
  const result = text === "" ? null : <Text text={text} search={search} code />;
  return (
    <>
      {turn.arguments != null && <Arguments text={turn.arguments} search={search} />}
      {turn.error && <p class="error">{marked(visible(turn.error), search)}</p>}
      {text.length > LONG ? (
        <Folded label={t("result")} text={text} search={search}>
          {result}
        </Folded>
      ) : (
        result
      )}
    </>
  );
}

function Arguments({ text, search }: { text: string; search: string }) {
  const pairs = argumentsOf(text);
  if (!pairs) return <pre class="code">{marked(visible(text), search)}</pre>;
  return (
    <dl class="arguments">
      {pairs.map(([name, value]) => (
        <div key={name}>
          <dt>{marked(visible(name), search)}</dt>
          <dd>{marked(visible(value), search)}</dd>
        </div>
      ))}
    </dl>
  );
}

interface SaidProps {
  text: string;
  search: string;
  markdown: boolean;
  muted: boolean;
  /** what the assistant wrote is the only place that has its calls */
  written: boolean;
}

/** What somebody says, in parts. */
function Said({ text, search, markdown, muted, written }: SaidProps) {
  const one = { search, markdown, muted, written };
  return (
    <>
      {blocksOf(text).map((block, i) => (
        <OneBlock key={i} block={block} {...one} />
      ))}
    </>
  );
}

function OneBlock({ block, search, markdown, muted, written }: { block: Block } & Omit<SaidProps, "text">) {
  const t = useText();
  const { kind, text, name } = block;
  if (kind === "text") return markdown ? <Rendered text={text} /> : <Text text={text} search={search} muted={muted} />;
  const code = <Text text={text} search={search} code />;
  if (kind === "code")
    return (
      <>
        {name && <div class="language muted">{visible(name)}</div>}
        {code}
      </>
    );
  const label = kind === "call" ? `${t("call")}${name ? ` ${visible(name)}` : ""}` : t("thinking");
  return (
    <Folded label={label} text={text} search={search} open={kind === "call" && written}>
      {kind === "call" ? code : <Text text={text} search={search} muted />}
    </Folded>
  );
}

interface FoldedProps {
  label: string;
  text: string;
  search: string;
  open?: boolean;
  children: ComponentChildren;
}

/** Open if the search is in it. */
function Folded({ label, text, search, open = false, children }: FoldedProps) {
  const t = useText();
  const found = search !== "" && text.toLowerCase().includes(search.toLowerCase());
  return (
    <details class="system" open={open || found}>
      <summary>
        {label} <span class="muted">{t("characterCount", { count: wholeNumber(text.length) })}</span>
      </summary>
      {children}
    </details>
  );
}

/** Brings the next or the previous turn to the top of a box, with n and p. */
export function useTurnKeys(box: { current: HTMLElement | null }): void {
  const move = (by: number): void => {
    const turns = [...(box.current?.querySelectorAll<HTMLElement>(".turn") ?? [])];
    if (turns.length === 0) return;
    const now = turns.findIndex((turn) => turn.classList.contains("here"));
    const next = now < 0 ? (by > 0 ? 0 : turns.length - 1) : Math.min(turns.length - 1, Math.max(0, now + by));
    turns[now]?.classList.remove("here");
    turns[next]!.classList.add("here");
    turns[next]!.scrollIntoView({ block: "center" });
  };
  useKeys({ n: () => move(1), p: () => move(-1) });
}
