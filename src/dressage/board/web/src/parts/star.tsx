import type { Place } from "../api/types";
import { inSnapshot } from "../api/snapshot";
import { useText } from "../i18n";
import { noteStar, setStar, starOf, type Stars } from "../state/stars";

interface Props {
  run: number;
  row: Place & { starred?: boolean; note?: string | null };
  stars: Stars;
}

export function Star({ run, row, stars }: Props) {
  const t = useText();
  const note = starOf(stars, run, row);
  noteStar(run, row);
  const toggle = (event: MouseEvent): void => {
    event.stopPropagation();
    if (!inSnapshot) void setStar(run, row, note === null ? "" : null);
  };
  return (
    <button
      type="button"
      class={`star ${note === null ? "" : "set"}`}
      aria-pressed={note !== null}
      aria-label={t("star")}
      title={note || t("star")}
      onClick={toggle}
    >
      {note === null ? "☆" : "★"}
    </button>
  );
}
