/** Turns the pages of a list that has more than one. */

import { whole } from "../maths/format";
import { patchRoute } from "../state/router";

interface Props {
  /** key of the query for the offset */
  name: "offset" | "from";
  offset: number;
  size: number;
  total: number;
}

export function Pages({ name, offset, size, total }: Props) {
  if (total <= size) return null;
  const turn = (to: number): void => patchRoute({ [name]: to || undefined }, true);
  return (
    <div class="bar pages">
      <button type="button" disabled={offset === 0} onClick={() => turn(offset - size)}>
        ‹
      </button>
      <span>
        {offset < total ? `${whole(offset + 1)}–${whole(Math.min(total, offset + size))}` : "–"} / {whole(total)}
      </span>
      <button type="button" disabled={offset + size >= total} onClick={() => turn(offset + size)}>
        ›
      </button>
    </div>
  );
}
