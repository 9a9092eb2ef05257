/** Numbers as text, the same in every language: a dot for decimals, a comma for thousands, a real minus sign. */

const MISSING = "–";

export function number(value: unknown, digits = 4): string {
  if (typeof value !== "number" || !Number.isFinite(value)) return MISSING;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-4) return minus(value.toExponential(Math.min(2, digits - 1)).replace("e+", "e"));
  if (size >= 10 ** (digits - 1)) return minus(grouped(Math.round(value)));
  return minus(String(Number(value.toPrecision(digits))));
}

/** Fixed decimals for columns of numbers that should line up. */
export function fixed(value: unknown, decimals: number): string {
  if (typeof value !== "number" || !Number.isFinite(value)) return MISSING;
  const text = value.toFixed(decimals);
  return minus(Number(text) === 0 ? text.replace("-", "") : text);
}

export function whole(value: unknown): string {
  return typeof value === "number" && Number.isFinite(value) ? minus(grouped(value)) : MISSING;
}

export function signed(value: unknown, digits = 3): string {
  const text = number(value, digits);
  return typeof value === "number" && value > 0 ? `+${text}` : text;
}

export function percent(value: unknown, decimals?: number): string {
  if (typeof value !== "number" || !Number.isFinite(value)) return MISSING;
  const share = value * 100;
  return `${minus(share.toFixed(decimals ?? (share !== 0 && Math.abs(share) < 9.95 ? 1 : 0)))} %`;
}

function grouped(value: number): string {
  return String(value).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
}

function minus(text: string): string {
  return text.replaceAll("-", "−");
}
