import type { Labelled } from "../api/types";
import { inSnapshot } from "../api/snapshot";
import { isStarred, type Labels, labelsOf, notesOf, rememberLabels, toggleStar } from "../state/labels";

interface Props {
  run: string;
  row: Labelled;
  labels: Labels;
  /** what it is called in the reader's language; given, as a table has many */
  label: string;
}

export function Star({ run, row, labels, label }: Props) {
  const own = labelsOf(labels, run, row);
  const set = isStarred(own);
  rememberLabels(run, row);
  const toggle = (event: MouseEvent): void => {
    event.stopPropagation();
    if (!inSnapshot) void toggleStar(run, row);
  };
  return (
    <button
      type="button"
      class={`star ${set ? "set" : ""}`}
      aria-pressed={set}
      aria-label={label}
      title={notesOf(own) || label}
      onClick={toggle}
    >
      {set ? "★" : "☆"}
    </button>
  );
}
