/** A choice of one among few, all in view. */

interface Props<K extends string> {
  options: Record<K, string>;
  chosen: K | null;
  onChoose: (key: K) => void;
}

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
