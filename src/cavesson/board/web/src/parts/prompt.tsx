/** A prompt, with its system turn folded away. */

import { useText } from "../i18n";
import { whole as wholeNumber } from "../maths/format";
import { systemTurn } from "../maths/prompt";
import { Text } from "./text";

interface Props {
  text: string;
  search?: string;
  muted?: boolean;
  /** characters of the whole text where the server sent only its beginning */
  whole?: number | null | undefined;
}

export function PromptText({ text, search = "", muted = false, whole }: Props) {
  const t = useText();
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
