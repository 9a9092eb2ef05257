import { useText } from "../i18n";

export function Failure({ text }: { text: string }) {
  const t = useText();
  return <p class="failure">{text === "not-exported" ? t("notExported") : text}</p>;
}

/** One line for something that could not be loaded. */
export function Problem({ text }: { text: string | null }) {
  const t = useText();
  return text === null ? null : (
    <p class="error" role="alert">
      {text === "not-exported" ? t("notExported") : text}
    </p>
  );
}
