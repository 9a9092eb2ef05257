/** A titled panel; with a picture inside, it can be saved. */

import type { ComponentChildren } from "preact";
import type { SvgFile } from "../charts/pen";
import { savePng, saveSvg } from "../charts/save";
import { useText } from "../i18n";

interface Props {
  title: string;
  hint?: string | undefined;
  /** of its heading: 2 where it stands below no other heading than the view's */
  level?: 2 | 3;
  class?: string;
  actions?: ComponentChildren;
  /** the picture as a file */
  save?: () => SvgFile;
  children: ComponentChildren;
}

export function Card({ title, hint, level = 3, class: kind = "", actions, save, children }: Props) {
  const t = useText();
  const Heading = `h${level}` as const;
  return (
    <section class={`card ${kind}`}>
      <header>
        <Heading title={hint}>{title}</Heading>
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
