/** What can wait until the first lines of a response are seen. */

import { useEffect, useState } from "preact/hooks";

/** Until the browser has brought the frame to the screen, on other threads. */
const PAUSE_MS = 12;

/** False until the page has been painted once with something that is there, where there is reason to wait. */
export function useAfterPaint(there: boolean, wait = true): boolean {
  const [painted, setPainted] = useState(!wait);
  useEffect(() => {
    if (painted || !there) return;
    let timer: ReturnType<typeof setTimeout> | undefined;
    const frame = requestAnimationFrame(() => (timer = setTimeout(() => setPainted(true), PAUSE_MS)));
    return () => {
      cancelAnimationFrame(frame);
      clearTimeout(timer);
    };
  }, [there]);
  return painted;
}
