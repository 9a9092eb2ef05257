/** Tables as text (RFC 4180). */

/** What was not measured is empty. */
export function csv(rows: readonly (readonly unknown[])[]): string {
  return rows.map((row) => row.map(field).join(",") + "\r\n").join("");
}

/** How a text begins that a spreadsheet takes for a formula. */
const FORMULA = /^[=+\-@\t\r]/;

function field(value: unknown): string {
  const written = value === null || value === undefined ? "" : String(value);
  const text = typeof value === "string" && FORMULA.test(written) ? `'${written}` : written;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
