/** Buttons that are on or off. */

import { patchRoute, useRoute } from "../state/router";

interface Props<K extends string> {
  options: Record<K, string>;
  chosen: K | null;
  onChoose: (key: K) => void;
}

/** A choice of one among few, all in view. */
export function Segments<K extends string>({ options, chosen, onChoose }: Props<K>) {
  return (
    <span class="segments">
      {(Object.keys(options) as K[]).map((key) => (
        <button
          key={key}
          type="button"
          class={key === chosen ? "on" : ""}
          aria-pressed={key === chosen}
          onClick={() => onChoose(key)}
        >
          {options[key]}
        </button>
      ))}
    </span>
  );
}

interface SwitchProps {
  /** key of the query */
  name: "regex" | "starred" | "zero" | "log" | "stripes" | "diff" | "seeds" | "full";
  label: string;
  title?: string;
  /** whether the label is a sign, so that the title is its name */
  sign?: boolean;
  class?: string;
}

/** Something that the address turns on. */
export function Switch({ name, label, title, sign = false, class: kind = "" }: SwitchProps) {
  const on = useRoute().query[name] === "1";
  const turn = (): void => patchRoute({ [name]: on ? undefined : 1 }, true);
  return (
    <button
      type="button"
      class={`${kind} ${on ? "on" : ""}`}
      aria-pressed={on}
      aria-label={sign ? title : undefined}
      title={title}
      onClick={turn}
    >
      {label}
    </button>
  );
}
