/** A titled panel; with a picture inside, it can be saved. */

import type { ComponentChildren } from "preact";
import type { SvgFile } from "../charts/pen";
import { savePng, saveSvg } from "../charts/save";
import { useText } from "../i18n";

interface Props {
  title: string;
  hint?: string | undefined;
  class?: string;
  actions?: ComponentChildren;
  /** the picture as a file */
  save?: () => SvgFile;
  children: ComponentChildren;
}

export function Card({ title, hint, class: kind = "", actions, save, children }: Props) {
  const t = useText();
  return (
    <section class={`card ${kind}`}>
      <header>
        <h3 title={hint}>{title}</h3>
        {actions}
        {save && (
          <span class="saves">
            <button type="button" title={t("saveSvg")} onClick={() => saveSvg(title, save()[0])}>
              SVG
            </button>
            <button type="button" title={t("savePng")} onClick={() => void savePng(title, ...save())}>
              PNG
            </button>
          </span>
        )}
      </header>
      {children}
    </section>
  );
}
