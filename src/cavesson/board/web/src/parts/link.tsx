/** A link within the page: a plain click stays here, any other click does what the browser does. */

import type { ComponentChildren } from "preact";
import { onRest } from "../api/client";
import { inSnapshot } from "../api/snapshot";
import { formatRoute, go, type Route } from "../state/router";

interface Props {
  to: Route;
  class?: string;
  title?: string;
  current?: boolean;
  /** when the pointer rests on it */
  onPoint?: (to: Route) => void;
  children: ComponentChildren;
}

export function Link({ to, class: kind, title, current, onPoint, children }: Props) {
  const follow = (event: MouseEvent): void => {
    if (event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    go(to.view, to.query);
  };
  const href = (inSnapshot ? "#" : "") + formatRoute(to);
  return (
    <a
      href={href}
      class={kind}
      title={title}
      aria-current={current ? "page" : undefined}
      onClick={follow}
      onMouseEnter={onPoint && !current ? () => onRest(() => onPoint(to)) : undefined}
    >
      {children}
    </a>
  );
}
