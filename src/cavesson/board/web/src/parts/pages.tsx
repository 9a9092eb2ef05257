/** Turns the pages of a list that has more than one. */

import { whole } from "../maths/format";

interface Props {
  offset: number;
  size: number;
  total: number;
  onTurn: (offset: number) => void;
}

export function Pages({ offset, size, total, onTurn }: Props) {
  if (total <= size) return null;
  return (
    <div class="bar pages">
      <button type="button" disabled={offset === 0} onClick={() => onTurn(offset - size)}>
        ‹
      </button>
      <span>
        {offset + 1}–{Math.min(total, offset + size)} / {whole(total)}
      </span>
      <button type="button" disabled={offset + size >= total} onClick={() => onTurn(offset + size)}>
        ›
      </button>
    </div>
  );
}
