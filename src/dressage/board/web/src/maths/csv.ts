/** Tables as text (RFC 4180). */

/** What was not measured is empty. */
export function csv(rows: readonly (readonly unknown[])[]): string {
  return rows.map((row) => row.map(field).join(",") + "\r\n").join("");
}

function field(value: unknown): string {
  const text = value === null || value === undefined ? "" : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
