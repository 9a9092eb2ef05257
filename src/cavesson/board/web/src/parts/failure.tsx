import { NO_ANSWER } from "../api/client";
import { useText } from "../i18n";

/** An error as the reader sees it: the server writes sentences, the page itself knows two that it translates. */
export function useMessage(): (text: string) => string {
  const t = useText();
  return (text) => (text === "not-exported" ? t("notExported") : text === NO_ANSWER ? t("connectionLost") : text);
}

export function Failure({ text }: { text: string }) {
  return <p class="failure">{useMessage()(text)}</p>;
}

/** One line for something that could not be loaded. */
export function Problem({ text }: { text: string | null }) {
  const message = useMessage();
  return text === null ? null : (
    <p class="error" role="alert">
      {message(text)}
    </p>
  );
}
