/** What a query can ask for: examples that work on the run, and its tables with the columns that have values. */

import type { SqlTables } from "../api/types";
import { type Key, language, useText } from "../i18n";
import { nameInSql } from "../maths/answer";
import { useStore } from "../state/store";
import { Card } from "./card";

export function Examples({
  examples,
  onChoose,
}: {
  examples: SqlTables["examples"];
  onChoose: (query: string) => void;
}) {
  const t = useText();
  return (
    <Card title={t("examples")} level={2} class="examples">
      <ul>
        {examples.map(({ name, query }) => (
          <li key={name}>
            <button type="button" class="quiet" title={query} onClick={() => onChoose(query)}>
              {t(`example_${name}` as Key)}
            </button>
          </li>
        ))}
      </ul>
    </Card>
  );
}

export function Tables({ tables, onInsert }: { tables: SqlTables["tables"]; onInsert: (name: string) => void }) {
  const t = useText();
  const chosen = useStore(language);
  return (
    <Card title={t("tablesColumns")} level={2} class="sql-tables">
      {tables.map(({ name, columns }) => (
        <details key={name}>
          <summary>
            <code>{name}</code> <span class="muted">{t(`table_${name}` as Key)}</span>
          </summary>
          <table class="plain" aria-label={name}>
            <tbody>
              {columns.map((column) => (
                <tr key={column.name}>
                  <th scope="row">
                    <button
                      type="button"
                      class="quiet"
                      title={t("insertName")}
                      onClick={() => onInsert(nameInSql(column.name))}
                    >
                      <code>{column.name}</code>
                    </button>
                    <code class="muted">{column.type}</code>
                  </th>
                  <td>{column.doc[chosen] ?? column.doc["en"] ?? ""}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </details>
      ))}
    </Card>
  );
}
