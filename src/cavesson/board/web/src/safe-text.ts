/** Every text and label on the page passes through here: names of runs, metrics, columns and parts are recorded too. */

import { options, type VNode } from "preact";
import { visible } from "./maths/text";

const LABELS = ["title", "aria-label", "placeholder", "alt"];

/** Control characters and direction marks become signs in whatever is rendered; values of fields stay as they are. */
export function showOnlyVisible(): void {
  const before = options.vnode;
  options.vnode = (vnode: VNode) => {
    const { type, props } = vnode as { type: unknown; props: unknown };
    if (typeof props === "string") (vnode as { props: unknown }).props = visible(props);
    else if (typeof type === "string") clean(props as Record<string, unknown>);
    before?.(vnode);
  };
}

function clean(props: Record<string, unknown>): void {
  for (const name of LABELS) {
    const label = props[name];
    if (typeof label === "string") props[name] = visible(label);
  }
}
