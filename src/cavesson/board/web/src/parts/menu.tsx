/** A button that opens a list; a click elsewhere or Escape closes it. */

import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";

interface Props {
  label: ComponentChildren;
  title: string;
  class?: string;
  stays?: boolean;
  children: ComponentChildren;
}

export function Menu({ label, title, class: kind = "", stays = false, children }: Props) {
  const [open, setOpen] = useState(false);
  const box = useRef<HTMLDivElement>(null);
  // The focus must not be lost with the list.
  const leave = (): void => {
    box.current!.querySelector("button")!.focus();
    setOpen(false);
  };
  useLayoutEffect(() => {
    if (!open) return;
    const close = (event: Event): void => {
      if (!(event instanceof KeyboardEvent)) {
        if (!box.current!.contains(event.target as Node)) setOpen(false);
      } else if (event.key === "Escape") {
        event.stopPropagation(); // what lies below stays open
        leave();
      }
    };
    addEventListener("pointerdown", close);
    addEventListener("keydown", close, true);
    return () => {
      removeEventListener("pointerdown", close);
      removeEventListener("keydown", close, true);
    };
  }, [open]);
  return (
    <div class="menu" ref={box}>
      <button
        type="button"
        class={kind}
        title={title}
        aria-label={title}
        aria-expanded={open}
        onClick={() => setOpen(!open)}
      >
        {label}
      </button>
      {open && (
        <div class="list" onClick={() => stays || leave()}>
          {children}
        </div>
      )}
    </div>
  );
}
