/** A line through a picture of all tokens at the token looked at. */

import { type Store, useStore } from "../state/store";
import type { Looked } from "./measured";

interface Props {
  count: number;
  looked: Store<Looked>;
  /** pixels before the picture's first token */
  left: number;
}

export function Cross({ count, looked, left }: Props) {
  const { token, pinned } = useStore(looked);
  const at = token ?? pinned;
  if (at === null) return null;
  return (
    <div class="cross" style={{ left: `${left}px`, right: 0 }}>
      <i style={{ left: `${((at + 0.5) / count) * 100}%` }} />
    </div>
  );
}
