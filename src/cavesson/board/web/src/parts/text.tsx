/** Text from a run, as text and nothing else. */

import { useMemo, useState } from "preact/hooks";
import { useText } from "../i18n";
import { difference } from "../maths/diff";
import { whole as wholeNumber } from "../maths/format";
import { visible } from "../maths/text";

interface Props {
  text: string;
  search: string;
  muted?: boolean;
  /** in monospace */
  code?: boolean;
  /** characters of the whole text where the server sent only its beginning */
  whole?: number | null | undefined;
}

/** More than this is shown when asked for, ten times as much each time. */
const SHOWN = 20_000;

export function Text({ text, search, muted = false, code = false, whole }: Props) {
  const t = useText();
  const [shown, setShown] = useState(SHOWN);
  const cut = text.slice(0, shown);
  if (text === "") return <p class="muted">{t("emptyText")}</p>;
  return (
    <>
      <pre class={`text ${muted ? "muted" : ""} ${code ? "code" : ""}`}>{marked(visible(cut), search)}</pre>
      {cut.length < text.length && (
        <button type="button" onClick={() => setShown(shown * 10)}>
          {t("showMore", { count: wholeNumber(text.length) })}
        </button>
      )}
      <CutText whole={whole} />
    </>
  );
}

/** Says that the server sent only the beginning of a text. */
export function CutText({ whole }: { whole: number | null | undefined }) {
  const t = useText();
  return whole == null ? null : <p class="muted">{t("cutByServer", { count: wholeNumber(whole) })}</p>;
}

/** A text with every place of the search marked. */
export function marked(text: string, search: string) {
  if (search === "") return text;
  const pieces: preact.ComponentChildren[] = [];
  const [haystack, needle] = [text.toLowerCase(), search.toLowerCase()];
  if (haystack.length !== text.length) return text; // lower case changed lengths: places would be wrong
  let from = 0;
  for (let at = haystack.indexOf(needle); at >= 0 && pieces.length < 2000; at = haystack.indexOf(needle, from)) {
    pieces.push(text.slice(from, at), <mark>{text.slice(at, at + needle.length)}</mark>);
    from = at + needle.length;
  }
  return [...pieces, text.slice(from)];
}

export function TextDifference({ before, after }: { before: string; after: string }) {
  const changes = useMemo(() => difference(before.slice(0, 200_000), after.slice(0, 200_000)), [before, after]);
  return (
    <pre class="text">
      {changes.map(({ kind, text }) => {
        const shown = visible(text);
        return kind === "same" ? shown : kind === "added" ? <ins>{shown}</ins> : <del>{shown}</del>;
      })}
    </pre>
  );
}
