/** A button that opens a list; a click elsewhere or Escape closes it. */

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

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
  useEffect(() => {
    if (!open) return;
    const close = (event: Event): void => {
      const outside = !box.current!.contains(event.target as Node);
      if (event instanceof KeyboardEvent ? event.key === "Escape" : outside) setOpen(false);
    };
    addEventListener("pointerdown", close);
    addEventListener("keydown", close);
    return () => {
      removeEventListener("pointerdown", close);
      removeEventListener("keydown", close);
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
        <div class="list" onClick={() => stays || setOpen(false)}>
          {children}
        </div>
      )}
    </div>
  );
}
