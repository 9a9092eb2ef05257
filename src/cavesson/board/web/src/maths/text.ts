/** Text that others wrote, made safe to look at: what would act or hide is shown by a sign instead. */

const BIDI: Record<string, string> = {
  "\u200e": "LRM",
  "\u200f": "RLM",
  "\u061c": "ALM",
  "\u202a": "LRE",
  "\u202b": "RLE",
  "\u202c": "PDF",
  "\u202d": "LRO",
  "\u202e": "RLO",
  "\u2066": "LRI",
  "\u2067": "RLI",
  "\u2068": "FSI",
  "\u2069": "PDI",
};

/** Their names in ISO 646; the signs of U+2400 are missing from many fonts. */
const CONTROL = [
  ..."NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI".split(" "),
  ..."DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US".split(" "),
];

const ACTING = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f" + // controls other than tab and newline
    "\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069" + // directions
    "\\u00ad\\u115f\\u1160\\u180e\\u200b\\u2060-\\u2064\\u206a-\\u206f\\u3164\\ufeff\\uffa0" + // no width, or blank
    "\\u2028\\u2029\\ufff9-\\ufffb\\u{1bca0}-\\u{1bca3}\\u{1d173}-\\u{1d17a}" + // separators and formats
    "\\u{e0000}-\\u{e007f}]", // tags
  "gu",
);
const LONE = /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

/** Control and invisible characters, direction marks and lone surrogates as signs; newline, tab and all else stay. */
export function visible(text: string): string {
  return text.replace(ACTING, sign).replace(LONE, (unit) => `⟨${unit.charCodeAt(0).toString(16).toUpperCase()}⟩`);
}

function sign(character: string): string {
  const code = character.codePointAt(0) ?? 0;
  const name = CONTROL[code] ?? BIDI[character] ?? `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
  return `⟨${name}⟩`;
}

/** One line of a text for a table's cell. */
export function oneLine(text: string): string {
  return visible(text.replace(/\r?\n/g, " ⏎ ").replace(/\t/g, " "));
}

/** At most so many units of a text, and a sign that there is more; no character is cut in half. */
export function beginning(text: string, most: number): string {
  if (text.length <= most) return text;
  const half = /[\ud800-\udbff]/.test(text.charAt(most - 1));
  return `${text.slice(0, half ? most - 1 : most)}…`;
}

const RTL = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;
const STRONG = /\p{L}/u;

/** The direction of a paragraph by its first strong character (Unicode Standard Annex 9, rule P2). */
export function direction(text: string): "ltr" | "rtl" {
  for (const character of text) {
    if (RTL.test(character)) return "rtl";
    if (STRONG.test(character)) return "ltr";
  }
  return "ltr";
}
