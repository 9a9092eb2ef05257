import type { RolloutKey } from "../api/types";
import { inSnapshot } from "../api/snapshot";
import { noteStar, starOf, type Stars, toggleStar } from "../state/stars";

interface Props {
  run: string;
  row: RolloutKey & { starred?: boolean; note?: string | null };
  stars: Stars;
  /** what it is called in the reader's language; given, as a table has many */
  label: string;
}

export function Star({ run, row, stars, label }: Props) {
  const note = starOf(stars, run, row);
  noteStar(run, row);
  const toggle = (event: MouseEvent): void => {
    event.stopPropagation();
    if (!inSnapshot) void toggleStar(run, row);
  };
  return (
    <button
      type="button"
      class={`star ${note === null ? "" : "set"}`}
      aria-pressed={note !== null}
      aria-label={label}
      title={note || label}
      onClick={toggle}
    >
      {note === null ? "☆" : "★"}
    </button>
  );
}
