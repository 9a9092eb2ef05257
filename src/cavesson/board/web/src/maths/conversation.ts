/** Who says what in a text that a chat template or an importer wrote; known by its marks, never guessed. */

export interface Said {
  role: string;
  text: string;
  /** where the text begins in the whole */
  at: number;
  /** whether all of it is thinking */
  thinking?: boolean;
}

interface Template {
  /** opens a turn; the first group names who speaks, the second a channel, of which `analysis` is thinking */
  opens: RegExp;
  /** marks at the end of a turn, which are not part of what is said */
  closes: RegExp;
  /**
   * what the roles are in their order, with a space behind each: such marks are ordinary words, so that a text is only
   * known by them if it begins with one and this is found in its roles
   */
  order?: RegExp;
}

/**
 * Special tokens, which users cannot write where the tokenizer is used as it should be; the importers' marks; and what
 * is left of ChatML and Gemma's marks, of Llama 3's, and of ChatML's around results of tools in a response, where special
 * tokens were skipped in decoding.
 */
const TEMPLATES: readonly Template[] = [
  { opens: /<\|im_start\|>([^\n<]{1,40})\n/g, closes: /\s*<\|im_end\|>\s*$/ },
  { opens: /<\|start_header_id\|>([^<]{1,40})<\|end_header_id\|>\s*/g, closes: /\s*<\|(?:eot_id|eom_id)\|>\s*$/ },
  { opens: /<\|header_start\|>([^<]{1,40})<\|header_end\|>\s*/g, closes: /\s*<\|(?:eot|eom)\|>\s*$/ },
  { opens: /<start_of_turn>(\w+)\n/g, closes: /\s*<end_of_turn>\s*$/ },
  { opens: /<\|turn>(\w+)\n/g, closes: /\s*<turn\|>\s*$/ },
  {
    opens: /(?:<\|start\|>([\w.]+)[^<\n]*)?(?:<\|channel\|>([^<\n]*))?(?:<\|constrain\|>[^<\n]*)?<\|message\|>/g,
    closes: /\s*<\|(?:end|return|call)\|>(?:<\|start\|>assistant)?\s*$/,
  },
  { opens: /<\|START_OF_TURN_TOKEN\|><\|(\w+?)_TOKEN\|>/g, closes: /\s*<\|END_OF_TURN_TOKEN\|>\s*$/ },
  {
    opens: /<｜(User|Assistant|tool▁outputs▁begin|tool▁output▁begin)｜>/g,
    closes: /\s*<｜[\w▁]+(?:end|sentence)｜>\s*$/,
  },
  { opens: /<\|(system|user|assistant|tool|observation)\|>\n?/g, closes: /\s*(?:<\|end\|>|<\|endoftext\|>|<\/s>)\s*$/ },
  {
    opens: /\[(\/?(?:INST|SYSTEM_PROMPT|TOOL_RESULTS|AVAILABLE_TOOLS))\]\s?/g,
    closes: /\s*<\/s>\s*$/,
  },
  {
    opens:
      /^\[(system|developer|user|assistant|tool|environment|SYSTEM|DEVELOPER|USER|ASSISTANT|TOOL|USER\/TOOL)\]\n/gm,
    closes: /\n+$/,
    order: /^\w/,
  },
  {
    opens: /^\[(system|user|assistant|tool)\] /gm,
    closes: /\n+$/,
    order: /^(?=\w+ \w)(?:system )?(?:user assistant (?:(?:tool )+assistant )*)*(?:user )?$/,
  },
  {
    opens: /^(system|user|assistant|model|tool)\n/gm,
    closes: /\n(?![\s\S])/,
    order: /^(?:system )?(?:user assistant (?:(?:tool )+assistant )*)+$/,
  },
  {
    opens: /(?<![ \t])(system|user|assistant|ipython)\n\n/gm,
    closes: /(?!)/,
    order: /^system user assistant (?:(?:user |(?:tool )+)assistant )*$/,
  },
  { opens: /^(user(?=\n<tool_response>\n)|(?<=<\/tool_response>\n)assistant)\n/gm, closes: /\n(?![\s\S])/ },
];

/** Other names of the roles. */
const ROLES: Record<string, string> = {
  model: "assistant",
  chatbot: "assistant",
  "/inst": "assistant",
  "/tool_results": "assistant",
  inst: "user",
  human: "user",
  system_prompt: "system",
  available_tools: "system",
  "/system_prompt": "",
  "/available_tools": "",
  developer: "system",
  ipython: "tool",
  observation: "tool",
  function: "tool",
  environment: "tool",
  tool_results: "tool",
  tool_output: "tool",
  "tool▁output▁begin": "tool",
  "tool▁outputs▁begin": "tool",
};

/** What a tokenizer puts before everything. */
const BEGIN = /^(?:<s>|<bos>|<\|begin_of_text\|>|<\|startoftext\|>|<｜begin▁of▁sentence｜>|\[gMASK\]<sop>|\s)*/;

/** Hermes and Qwen write the results of tools as a user's turn. */
const RESULTS = /^\s*(?:<tool_response>(?:(?!<tool_response>)[^])*<\/tool_response>\s*)+$/;

/**
 * The turns of a text; null if it has no marks of a template and is not a list of messages.
 *
 * @param first who speaks before the first mark: in a response, the assistant, whose header ends the prompt
 */
export function templated(text: string, first: string): Said[] | null {
  const messages = messagesIn(text);
  if (messages) return messages;
  const template = TEMPLATES.find((one) => isOf(one, text));
  if (!template) return null;
  const marks = [...text.matchAll(template.opens)];
  const begin = BEGIN.exec(text)![0].length;
  const pieces = [{ role: first, at: begin, end: marks[0]!.index, thinking: false }];
  marks.forEach((mark, i) => {
    const role = mark[1] === undefined ? first : roleOf(mark[1]);
    const end = marks[i + 1]?.index ?? text.length;
    pieces.push({ role, at: mark.index + mark[0].length, end, thinking: mark[2] === "analysis" });
  });
  return pieces.flatMap(({ role, at, end, thinking }) => {
    const said = text.slice(at, end).replace(template.closes, "");
    if (said.trim() === "") return [];
    if (role === "user" && RESULTS.test(said)) return [result(said, at)];
    return [{ role, text: said, at, ...(thinking ? { thinking } : {}) }];
  });
}

function isOf({ opens, order }: Template, text: string): boolean {
  const at = text.search(opens);
  if (!order || at !== 0) return !order && at >= 0;
  return order.test([...text.matchAll(opens)].map((mark) => `${roleOf(mark[1]!)} `).join(""));
}

const SPEAKERS = new Set(["system", "user", "assistant", "tool"]);

/** The chat messages that a text is in JSON. */
function messagesIn(text: string): Said[] | null {
  if (!/^\s*\[\s*\{/.test(text)) return null;
  let found: unknown[];
  try {
    found = JSON.parse(text) as unknown[];
  } catch {
    return null; // not JSON, or only the beginning of it
  }
  return found.every(isMessage) ? found.map(saidIn).filter((one) => one.text !== "") : null;
}

interface Message {
  role: string;
  content: string | unknown[] | null;
  [other: string]: unknown;
}

function isMessage(value: unknown): value is Message {
  if (typeof value !== "object" || value === null) return false;
  const { role, content } = value as Message;
  const isContent = typeof content === "string" || content === null || Array.isArray(content);
  return typeof role === "string" && SPEAKERS.has(roleOf(role)) && isContent;
}

/** What one message says: its content, and everything else that it has as JSON. */
function saidIn({ role, content, ...others }: Message): Said {
  const text = typeof content === "string" ? content : content === null ? "" : JSON.stringify(content);
  const rest = Object.entries(others).filter(([, value]) => value !== null && value !== "");
  const more = rest.length > 0 ? JSON.stringify(Object.fromEntries(rest)) : "";
  return { role: roleOf(role), text: [text, more].filter(Boolean).join("\n"), at: 0 };
}

function roleOf(name: string): string {
  const lower = name.trim().toLowerCase();
  return lower.startsWith("functions.") ? "tool" : (ROLES[lower] ?? lower);
}

const result = (said: string, at: number): Said => ({
  role: "tool",
  text: said.replace(/<\/?tool_response>\n?/g, "").trim(),
  at,
});

export type Kind = "text" | "thinking" | "code" | "call";

export interface Block {
  kind: Kind;
  text: string;
  /** of code its language, of a call the tool */
  name?: string;
}

/** Thinking, calls of tools, and blocks of code, each up to its end or that of the text. */
const BLOCKS = new RegExp(
  [
    /<(?<tag>think|thinking|reasoning)>(?<thought>[^]*?)(?:<\/\k<tag>>|(?![^]))/,
    /\[THINK\](?<thinking>[^]*?)(?:\[\/THINK\]|(?![^]))/,
    /<tool_call>(?<call>[^]*?)(?:<\/tool_call>|(?![^]))/,
    /(?:\[TOOL_CALLS\]|<\|python_tag\|>)(?<calls>[^]*)/,
    /^(?<fence>```|~~~)(?<language>[^\n`]*)\n(?<code>[^]*?)(?:\n?^\k<fence>[ \t]*$|(?![^]))/,
  ]
    .map(({ source }) => source)
    .join("|"),
  "gm",
);

/** The parts of what an assistant says. Templates may open the thinking in the prompt: it then only ends here. */
export function blocksOf(text: string): Block[] {
  const closed = /^((?:(?!<think>)[^])*?)<\/think>/.exec(text);
  const blocks: Block[] = closed ? [{ kind: "thinking", text: closed[1]! }] : [];
  let from = closed ? closed[0].length : 0;
  const plain = (to: number): void => {
    const said = text.slice(from, to).replace(/^\n+|\s+$/g, "");
    if (said !== "") blocks.push({ kind: "text", text: said });
  };
  for (const found of text.matchAll(BLOCKS)) {
    if (found.index < from) continue;
    plain(found.index);
    from = found.index + found[0].length;
    blocks.push(blockOf(found));
  }
  if (from === 0) return [{ kind: "text", text }];
  plain(text.length);
  return blocks.filter((block) => block.kind !== "thinking" || block.text.trim() !== "");
}

function blockOf({ groups }: RegExpMatchArray): Block {
  const { thought, thinking = thought, call, calls = call, language, code } = groups!;
  if (thinking !== undefined) return { kind: "thinking", text: thinking.trim() };
  if (calls !== undefined) return { kind: "call", text: calls.trim(), ...nameOf(calls) };
  return { kind: "code", text: code ?? "", name: (language ?? "").trim() };
}

function nameOf(call: string): { name?: string } {
  const name = /"name"\s*:\s*"([^"\\]{1,80})"/.exec(call) ?? /^\s*(?:<function=)?([\w.-]{1,80})(?:>|\[|\{)/.exec(call);
  return name ? { name: name[1]! } : {};
}

/** The arguments of a call, one on each line; as they are if they are no object. */
export function argumentsOf(text: string): [name: string, value: string][] | null {
  try {
    const value: unknown = JSON.parse(text);
    if (typeof value !== "object" || value === null || Array.isArray(value)) return null;
    return Object.entries(value).map(([name, one]) => [name, typeof one === "string" ? one : JSON.stringify(one)]);
  } catch {
    return null; // what could not be parsed is a text
  }
}
