/** Notes on steps and curves: a field for the step looked at, and a list of all of them. */

import { useRef } from "preact/hooks";
import { inSnapshot } from "../api/snapshot";
import type { Note } from "../api/types";
import { useText } from "../i18n";
import { visible } from "../maths/text";
import { useKeys } from "../state/keys";
import { author } from "../state/labels";
import { writeNote } from "../state/notes";
import { patchRoute, useRoute } from "../state/router";
import { useStore } from "../state/store";
import { Card } from "./card";
import { AuthorField } from "./labels";
import { NoteField } from "./note-field";
import { SaveTable } from "./save-table";

interface Props {
  run: string;
  step: number;
  notes: Note[];
  /** names of the curves that are drawn */
  curves: string[];
}

export function NotesCard({ run, step, notes, curves }: Props) {
  const t = useText();
  if (inSnapshot && notes.length === 0) return null;
  const rows = (): unknown[][] => [
    ["step", "curve", "note", "author", "time"],
    ...notes.map((one) => [one.step, one.metric ?? "", one.text, one.author, one.time]),
  ];
  return (
    <Card
      title={t("notes")}
      level={2}
      class="notes"
      actions={notes.length > 0 && <SaveTable name={`notes-${run}`} rows={rows} />}
    >
      {!inSnapshot && <Writing run={run} step={step} notes={notes} curves={curves} />}
      <NoteList notes={notes} onOpen={(note) => patchRoute({ step: note.step, on: note.metric ?? undefined }, true)} />
    </Card>
  );
}

function Writing({ run, step, notes, curves }: Props) {
  const t = useText();
  const on = useRoute().query["on"] ?? null;
  const me = useStore(author).trim();
  const field = useRef<HTMLTextAreaElement>(null);
  useKeys({ m: () => field.current?.focus() });
  const mine = notes.find((one) => one.step === step && one.metric === on && one.author === me);
  const known = on === null || curves.includes(on) ? curves : [on, ...curves];
  return (
    <div class="bar">
      <label>
        {t("stepNumber", { step })}
        <select
          aria-label={t("noteOn")}
          value={on ?? ""}
          onChange={(event) => patchRoute({ on: event.currentTarget.value }, true)}
        >
          <option value="">{t("wholeStep")}</option>
          {known.map((name) => (
            <option key={name} value={name}>
              {name}
            </option>
          ))}
        </select>
      </label>
      <AuthorField />
      <NoteField
        at={`${run}/${step}/${on ?? ""}/${me}`}
        note={mine?.text ?? ""}
        field={field}
        label={t("note")}
        placeholder={t("stepNoteHint")}
        // A step that follows the newest one would change under the hands of the writer.
        onFocus={() => patchRoute({ step }, true)}
        onKeep={(text) => writeNote(run, step, on, text)}
      />
    </div>
  );
}

interface ListProps {
  notes: (Note & { run?: string })[];
  /** absent where no step can be chosen */
  onOpen?: (note: Note) => void;
}

export function NoteList({ notes, onOpen }: ListProps) {
  const t = useText();
  if (notes.length === 0) return null;
  return (
    <ul class="note-list">
      {notes.map((note) => {
        const step = t("stepNumber", { step: note.step });
        return (
          <li key={[note.run, note.step, note.metric, note.author].join("/")}>
            {onOpen ? (
              <button type="button" class="quiet" onClick={() => onOpen(note)}>
                {step}
              </button>
            ) : (
              <span>
                {note.run} · {step}
              </span>
            )}
            {note.metric !== null && <code>{visible(note.metric)}</code>}
            <span class="said">{visible(note.text)}</span>
            <span class="muted" title={note.time}>
              {visible(note.author || t("somebody"))} · {note.time.slice(0, 10)}
            </span>
          </li>
        );
      })}
    </ul>
  );
}

/** Chooses a curve to write on; a part of the head of its chart. */
export function NoteButton({ name }: { name: string }) {
  const t = useText();
  const choose = (): void => {
    patchRoute({ on: name }, true);
    document.querySelector<HTMLElement>(".notes textarea")?.focus();
  };
  if (inSnapshot) return null;
  return (
    <span class="saves">
      <button type="button" title={t("noteOnCurve", { name })} aria-label={t("noteOnCurve", { name })} onClick={choose}>
        ✎
      </button>
    </span>
  );
}
