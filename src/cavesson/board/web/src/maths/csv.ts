/** Tables as text (RFC 4180). */

/** What was not measured is empty. */
export function csv(rows: readonly (readonly unknown[])[]): string {
  return rows.map((row) => row.map(field).join(",") + "\r\n").join("");
}

/** How a text begins that a spreadsheet may take for a formula, as in cavesson/text/spreadsheet.py. */
const FORMULA = /^(?:[\t\r\n]|[\s\x00-\x1f\x85\u200b-\u200f\u2060\ufeff'"]*[=+\-@＝＋－＠])/;

function field(value: unknown): string {
  const written = value === null || value === undefined ? "" : String(value);
  const text = typeof value === "string" && FORMULA.test(written) ? `'${written}` : written;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
