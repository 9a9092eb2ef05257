/** A small table as it stands on the page, as CSV. */

import { saveFile } from "../charts/save";
import { useText } from "../i18n";
import { csv } from "../maths/csv";

/** `rows`: the names of the columns, and a line for each line. */
export function SaveTable({ name, rows }: { name: string; rows: () => unknown[][] }) {
  const t = useText();
  return (
    <span class="saves">
      <button type="button" title={t("saveCsv")} onClick={() => saveFile(`${name}.csv`, csv(rows()), "text/csv")}>
        CSV
      </button>
    </span>
  );
}
