/** What people say of a rollout: a rating, tags and a note, and what others said. */

import { useRef, useState } from "preact/hooks";
import { address } from "../api/client";
import { useResource } from "../api/resource";
import { inSnapshot } from "../api/snapshot";
import type { Label, Labelled, LabelledRollout } from "../api/types";
import { useText } from "../i18n";
import { visible } from "../maths/text";
import { useKeys } from "../state/keys";
import { author, labelsOf, rememberLabels, setLabel, useLabels } from "../state/labels";
import { useStore } from "../state/store";
import { NoteField } from "./note-field";

const LONGEST_NAME = 100;
const RATINGS = [1, 2, 3, 4, 5];

interface Props {
  run: string;
  row: Labelled;
}

export function LabelPanel({ run, row }: Props) {
  const t = useText();
  const changed = useLabels();
  const me = useStore(author).trim();
  const labels = labelsOf(changed, run, row);
  const tag = useRef<HTMLInputElement>(null);
  const note = useRef<HTMLTextAreaElement>(null);
  rememberLabels(run, row);
  const rating = labels.find((one) => one.name === "rating" && one.author === me)?.value;
  const rate = (value: number): void =>
    void setLabel(run, row, { name: "rating", value: value || Number(rating) }, value === 0 || value === rating);
  useKeys({
    ...Object.fromEntries([0, ...RATINGS].map((value) => [`r ${value}`, () => (value || rating) && rate(value)])),
    t: () => tag.current?.focus(),
    m: () => note.current?.focus(),
  });
  const text = String(labels.find((one) => one.name === "note" && one.author === me)?.value ?? "");
  const others = labels.filter((one) => one.author !== me && (one.name === "rating" || one.name === "note"));
  return (
    <div class="labels">
      <span class="segments" role="group" aria-label={t("rating")}>
        {RATINGS.map((value) => (
          <button
            key={value}
            type="button"
            class={rating === value ? "on" : ""}
            aria-pressed={rating === value}
            aria-label={t("rate", { value })}
            title={t("rate", { value })}
            disabled={inSnapshot}
            onClick={() => rate(value)}
          >
            {value}
          </button>
        ))}
      </span>
      <Tags run={run} row={row} labels={labels} field={tag} />
      {!inSnapshot && <AuthorField />}
      <Note run={run} row={row} note={text} field={note} />
      {others.map((one) => (
        <p key={`${one.name} ${one.author}`} class="muted" title={one.time ?? undefined}>
          <b>{visible(one.author || t("somebody"))}</b>{" "}
          {one.name === "rating" ? `${one.value}/5` : visible(String(one.value))}
        </p>
      ))}
    </div>
  );
}

interface TagsProps extends Props {
  labels: Label[];
  field: { current: HTMLInputElement | null };
}

function Tags({ run, row, labels, field }: TagsProps) {
  const t = useText();
  const [typing, setTyping] = useState(false);
  const all = useResource<LabelledRollout[]>(typing ? address(`runs/${run}/labels`) : null).data ?? [];
  const tags = labels.filter(({ name }) => name === "tag");
  const known = new Set(
    all.flatMap((one) => one.labels.filter(({ name }) => name === "tag").map(({ value }) => value)),
  );
  const add = (input: HTMLInputElement): void => {
    const value = input.value.trim();
    if (value) void setLabel(run, row, { name: "tag", value });
    input.value = "";
  };
  return (
    <>
      <span class="chips">
        {tags.map(({ value, author: by, time }) => (
          <button
            key={value}
            type="button"
            class="tag"
            title={[t("removeTag"), by, time].filter(Boolean).join(" · ")}
            disabled={inSnapshot}
            onClick={() => void setLabel(run, row, { name: "tag", value }, true)}
          >
            {visible(String(value))}
            {!inSnapshot && " ✕"}
          </button>
        ))}
      </span>
      {!inSnapshot && (
        <input
          ref={field}
          class="steps"
          list="known-tags"
          placeholder={t("addTag")}
          aria-label={t("addTag")}
          maxLength={LONGEST_NAME}
          onFocus={() => setTyping(true)}
          onBlur={(event) => add(event.currentTarget)}
          onKeyDown={(event) => {
            if (event.isComposing) return;
            if (event.key === "Enter") add(event.currentTarget);
            if (event.key === "Escape") event.currentTarget.blur();
          }}
        />
      )}
      {typing && (
        <datalist id="known-tags">
          {[...known].map((value) => (
            <option key={value} value={String(value)} />
          ))}
        </datalist>
      )}
    </>
  );
}

export function AuthorField() {
  const t = useText();
  return (
    <input
      class="steps"
      placeholder={t("yourName")}
      title={t("yourNameHint")}
      aria-label={t("yourName")}
      maxLength={LONGEST_NAME}
      value={useStore(author)}
      onInput={(event) => author.set(event.currentTarget.value)}
      onKeyDown={(event) => /^(Enter|Escape)$/.test(event.key) && event.currentTarget.blur()}
    />
  );
}

interface NoteProps extends Props {
  note: string;
  field: { current: HTMLTextAreaElement | null };
}

function Note({ run, row, note, field }: NoteProps) {
  const t = useText();
  return (
    <NoteField
      at={`${run}/${row.step}/${row.sample}`}
      note={note}
      field={field}
      label={t("note")}
      placeholder={t("noteHint")}
      onKeep={(text) => setLabel(run, row, { name: "note", value: text }, text === "")}
    />
  );
}
