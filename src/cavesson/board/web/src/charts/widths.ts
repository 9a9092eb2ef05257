/** When pictures are drawn: together, and not before they can be seen. */

type Use = (width: number) => void;

const waiting = new Map<HTMLElement, Use>();
const below = new Map<Element, Use>();

/** Told a little before something comes into view. */
const nearing = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      const use = below.get(target);
      if (!use || !isIntersecting) continue;
      forgetWidth(target as HTMLElement);
      withWidth(target as HTMLElement, use);
    }
  },
  { scrollMargin: "200px" } as IntersectionObserverInit,
);

/**
 * Says how wide an element is, before the browser paints, or once it comes into view; the last call for one counts.
 *
 * All widths are read before anything is done with them: drawing makes the browser lay the page out anew for the next.
 */
export function withWidth(element: HTMLElement, use: Use): void {
  if (waiting.size === 0) queueMicrotask(readAll);
  waiting.set(element, use);
}

/** Takes back what was asked for an element that goes. */
export function forgetWidth(element: HTMLElement): void {
  waiting.delete(element);
  below.delete(element);
  nearing.unobserve(element);
}

function readAll(): void {
  const read = Array.from(waiting, ([element, use]) => {
    return { element, use, width: element.clientWidth, top: element.getBoundingClientRect().top };
  });
  waiting.clear();
  for (const { element, use, width, top } of read) {
    if (top < innerHeight) {
      if (width > 0) use(width);
    } else {
      below.set(element, use);
      nearing.observe(element);
    }
  }
}
