/** Finds the system prompt in a prompt that a chat template wrote. */

/** How templates open a system turn, and how they close it. */
const SYSTEM: readonly RegExp[] = [
  /<\|im_start\|>system\n[^]*?<\|im_end\|>\n?/,
  /<\|start_header_id\|>system<\|end_header_id\|>[^]*?<\|eot_id\|>/,
  /<<SYS>>[^]*?<<\/SYS>>\s*/,
  /<\|system\|>\n?[^]*?(?:<\|end\|>|<\/s>|(?=<\|user\|>))\n?/,
  /<\|start\|>system<\|message\|>[^]*?<\|end\|>/,
  /\[SYSTEM_PROMPT\][^]*?\[\/SYSTEM_PROMPT\]/,
];

/** A template's system turn stands within the first characters: no long text is searched for one. */
const NEAR = 200;

/** The text before the system turn, the turn, and what follows; null where there is none. */
export function systemTurn(prompt: string): [before: string, system: string, after: string] | null {
  for (const pattern of SYSTEM) {
    const found = pattern.exec(prompt);
    if (!found || found.index > NEAR) continue;
    const end = found.index + found[0].length;
    return [prompt.slice(0, found.index), found[0], prompt.slice(end)];
  }
  return null;
}

/** What templates write around a turn, and how it is said shorter. */
const MARKS: readonly [RegExp, string][] = [
  [/<\|im_start\|>(\w+)\n/g, "$1: "],
  [/<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*/g, "$1: "],
  [/<\|(user|assistant)\|>\n?/g, "$1: "],
  [/<\|(?:im_end|eot_id|end|begin_of_text)\|>\n?/g, " "],
];

/** The prompt for a single line: without its system turn, which is the same everywhere, and without the template's marks. */
export function gist(prompt: string): string {
  const turns = systemTurn(prompt);
  let text = turns ? turns[0] + turns[2] : prompt;
  for (const [mark, short] of MARKS) text = text.replace(mark, short);
  return text.trim() === "" ? prompt : text.trim();
}
