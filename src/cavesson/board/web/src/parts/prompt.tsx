/** A prompt as the conversation that its marks tell, with its system turn folded away. */

import { useText } from "../i18n";
import { whole as wholeNumber } from "../maths/format";
import { templated } from "../maths/conversation";
import { systemTurn } from "../maths/prompt";
import { Conversation } from "./conversation";
import { CutText, Text } from "./text";

interface Props {
  text: string;
  search?: string;
  muted?: boolean;
  /** characters of the whole text where the server sent only its beginning */
  whole?: number | null | undefined;
}

export function PromptText({ text, search = "", muted = false, whole }: Props) {
  const t = useText();
  const said = templated(text, "");
  if (said && said.length > 1)
    return (
      <>
        <Conversation turns={said} search={search} muted={muted} />
        <CutText whole={whole} />
      </>
    );
  const turns = systemTurn(text);
  if (!turns) return <Text text={text} search={search} muted={muted} whole={whole} />;
  const [before, system, after] = turns;
  const found = search !== "" && system.toLowerCase().includes(search.toLowerCase());
  return (
    <>
      {before !== "" && <Text text={before} search={search} muted={muted} />}
      <details class="system" open={found}>
        <summary>
          {t("systemPrompt")} <span class="muted">{t("characterCount", { count: wholeNumber(system.length) })}</span>
        </summary>
        <Text text={system} search={search} muted />
      </details>
      <Text text={after} search={search} muted={muted} whole={whole} />
    </>
  );
}
