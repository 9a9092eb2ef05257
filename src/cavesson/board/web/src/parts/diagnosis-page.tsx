/** What is known of a kind of finding: the page of the documentation, whose links lead to those of other kinds. */

import { address } from "../api/client";
import { useResource } from "../api/resource";
import { inSnapshot } from "../api/snapshot";
import type { DiagnosisPages } from "../api/types";
import { language, useText } from "../i18n";
import { patched } from "../state/address";
import { type Route, useRoute } from "../state/router";
import { useStore } from "../state/store";
import { Link } from "./link";
import { LinkRoute, Rendered } from "./rendered";

interface Props {
  rule: string;
  /** those of all findings */
  pages: DiagnosisPages;
}

export function DiagnosisPage({ rule, pages }: Props) {
  const t = useText();
  const { view, query } = useRoute();
  const chosen = useStore(language);
  const about = query["about"] ?? rule;
  const other = useResource<DiagnosisPages>(about in pages ? null : address("diagnosis", { rules: about })).data;
  const text = pages[about] ?? other?.[about];
  if (!text) return null;
  const routeTo = (name: string): Route => ({
    view,
    query: patched(query, { about: name === rule ? undefined : name }),
  });
  const linked = (href: string): Route | null => {
    const [, name] = /^([a-z-]+)\.md$/.exec(href) ?? [];
    return name === undefined || (inSnapshot && !(name in pages)) ? null : routeTo(name);
  };
  return (
    <section class="diagnosis" aria-label={t("diagnosisPage")}>
      {chosen !== "en" && <p class="muted">{t("inEnglish")}</p>}
      {about !== rule && <Link to={routeTo(rule)}>‹ {t("back")}</Link>}
      <div lang="en">
        <LinkRoute.Provider value={linked}>
          <Rendered text={text} />
        </LinkRoute.Provider>
      </div>
    </section>
  );
}
