import assert from "node:assert/strict";
import { test } from "node:test";
import { turnStarts, type Tokens, whyNotLearned } from "../src/api/tokens";
import { argumentsOf, blocksOf, templated } from "../src/maths/conversation";
import { breakLines } from "../src/maths/layout";
import { joinTokens } from "../src/maths/units";

/** One conversation as each template writes it: a prompt, and a response of two turns with a result between them. */
const TEXTS: Record<string, [prompt: string, response: string]> = {
  chatml: [
    "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n",
    "C<|im_end|>\n<|im_start|>user\n<tool_response>\nR\n</tool_response><|im_end|>\n<|im_start|>assistant\nA<|im_end|>",
  ],
  llama3: [
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "C<|eom_id|><|start_header_id|>ipython<|end_header_id|>\n\nR<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>",
  ],
  llama4: [
    "<|begin_of_text|><|header_start|>system<|header_end|>\n\nS<|eot|><|header_start|>user<|header_end|>\n\nQ<|eot|><|header_start|>assistant<|header_end|>\n\n",
    "C<|eom|><|header_start|>ipython<|header_end|>\n\nR<|eot|><|header_start|>assistant<|header_end|>\n\nA<|eot|>",
  ],
  mistral: ["<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]Q[/INST]", "C</s>[TOOL_RESULTS]R[/TOOL_RESULTS]A</s>"],
  gemma: [
    "<bos><start_of_turn>system\nS<end_of_turn>\n<start_of_turn>user\nQ<end_of_turn>\n<start_of_turn>model\n",
    "C<end_of_turn>\n<start_of_turn>tool\nR<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>",
  ],
  gptOss: [
    "<|start|>system<|message|>S<|end|><|start|>user<|message|>Q<|end|><|start|>assistant",
    "<|channel|>commentary<|message|>C<|call|><|start|>functions.f to=assistant<|message|>R<|end|><|start|>assistant<|channel|>final<|message|>A<|return|>",
  ],
  glm: ["[gMASK]<sop><|system|>\nS<|user|>\nQ<|assistant|>\n", "C<|observation|>\nR<|assistant|>\nA"],
  phi: [
    "<|system|>\nS<|end|>\n<|user|>\nQ<|end|>\n<|assistant|>\n",
    "C<|end|>\n<|tool|>\nR<|end|>\n<|assistant|>\nA<|end|>",
  ],
  commandR: [
    "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>S<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>Q<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "C<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|TOOL_TOKEN|>R<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>A<|END_OF_TURN_TOKEN|>",
  ],
  // verl decodes without special tokens.
  decoded: ["system\nS\nuser\nQ\nassistant\n", "C\nuser\n<tool_response>\nR\n</tool_response>\nassistant\nA"],
  json: [
    '[{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]',
    '[{"role": "assistant", "content": "C"}, {"role": "tool", "content": "R"}, {"role": "assistant", "content": "A"}]',
  ],
  marks: ["[system]\nS\n\n[user]\nQ", "[assistant]\nC\n\n[tool]\nR\n\n[assistant]\nA"],
};
const PROMPT = [
  ["system", "S"],
  ["user", "Q"],
];
const RESPONSE = [
  ["assistant", "C"],
  ["tool", "R"],
  ["assistant", "A"],
];
const pairs = (text: string, first: string) => templated(text, first)?.map(({ role, text }) => [role, text]);

for (const [name, [prompt, response]] of Object.entries(TEXTS))
  test(`the turns of ${name} are told by its marks`, () => {
    assert.deepEqual(
      pairs(prompt, "")?.filter(([role]) => role !== "assistant"),
      PROMPT,
    );
    assert.deepEqual(pairs(response, "assistant"), RESPONSE);
  });

test("the thinking of gpt-oss, and calls of Mistral and Llama 3, are told by their marks", () => {
  const text = "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>final<|message|>a<|return|>";
  const said = templated(text, "assistant")!.map(({ thinking, text }) => [thinking ?? false, text]);
  assert.deepEqual(said, [
    [true, "t"],
    [false, "a"],
  ]);
  assert.deepEqual(blocksOf('[THINK]t[/THINK]a[TOOL_CALLS]f[ARGS]{"a": 1}'), [
    { kind: "thinking", text: "t" },
    { kind: "text", text: "a" },
    { kind: "call", text: 'f[ARGS]{"a": 1}', name: "f" },
  ]);
  const call = '{"name": "f", "parameters": {}}';
  assert.deepEqual(blocksOf(`<|python_tag|>${call}`), [{ kind: "call", text: call, name: "f" }]);
});

test("what is left of the marks of Llama 3 and Gemma, and roles in brackets, tell turns", () => {
  assert.deepEqual(pairs("system\n\nS\n\nuser\n\nQassistant\n\n", ""), [["system", "S\n\n"], ...PROMPT.slice(1)]);
  assert.deepEqual(pairs("user\nQ\nmodel\n", ""), PROMPT.slice(1));
  assert.deepEqual(pairs("[system] S\n[user] Q", ""), PROMPT);
  assert.deepEqual(pairs("[SYSTEM]\nS\n\n[USER]\nQ\n\n[USER/TOOL]\nR", ""), [...PROMPT, ["user/tool", "R"]]);
});

test("ordinary text is not read as a conversation", () => {
  const texts = [
    "",
    "User: a\nAssistant: b",
    "a [user] b",
    "text\n[user]\nmore",
    "### Human: a",
    "[1] x\n[tool_use]\n",
    "[user] a",
    "user\na",
    "system\nuser\n",
    "user\na\nassistant\nb\nassistant\nc",
    "Dear user\n\nThe assistant\n\n",
    "assistant\na\nuser\nb",
    '[{"role": "user"}]',
    '[{"role": "user", "content": "cut',
  ];
  for (const text of texts) assert.equal(templated(text, "assistant"), null, text);
});

test("thinking, calls and code are told apart, and unfinished ones go to the end", () => {
  const text = 'a\n<think>\nt\n\nu\n</think>\nb\n<tool_call>\n{"name": "f"}\n</tool_call>\n```py\nx\n\ny\n```\nc';
  assert.deepEqual(blocksOf(text), [
    { kind: "text", text: "a" },
    { kind: "thinking", text: "t\n\nu" },
    { kind: "text", text: "b" },
    { kind: "call", text: '{"name": "f"}', name: "f" },
    { kind: "code", text: "x\n\ny", name: "py" },
    { kind: "text", text: "c" },
  ]);
  assert.deepEqual(blocksOf("t\nu</think>b"), [
    { kind: "thinking", text: "t\nu" },
    { kind: "text", text: "b" },
  ]);
  assert.deepEqual(blocksOf("<think>t\nu"), [{ kind: "thinking", text: "t\nu" }]);
  assert.deepEqual(blocksOf("a\n```\nx\ny"), [
    { kind: "text", text: "a" },
    { kind: "code", text: "x\ny", name: "" },
  ]);
  assert.deepEqual(blocksOf(" a\n b "), [{ kind: "text", text: " a\n b " }]);
});

test("the arguments of a call are read by name, and only from an object", () => {
  assert.deepEqual(argumentsOf('{"a": 6, "b": "x\\ny", "c": [1]}'), [
    ["a", "6"],
    ["b", "x\ny"],
    ["c", "[1]"],
  ]);
  for (const text of ["[1]", "3", "null", "{"]) assert.equal(argumentsOf(text), null, text);
});

/** Tokens as the server sends them; `columns` has what was recorded. */
function loaded(texts: string[], columns: Tokens["columns"], conversation: unknown[] = []): Tokens {
  const units = joinTokens(texts, null);
  return { rollout: { conversation }, count: texts.length, units, columns } as unknown as Tokens;
}

test("a token that was not learned says why", () => {
  const tokens = loaded(["a", "b", "c", "d", "e"], { learned: [1, 0, 0, 0, 0], source: [0, 0, 1, 2, 3] });
  const said = [0, 1, 2, 3, 4].map((token) => whyNotLearned(tokens, token));
  assert.deepEqual(said, [null, "whyExcluded", "whyTemplate", "whyTool", "whyUser"]);
  assert.equal(whyNotLearned(loaded(["a"], { learned: [0] }), 0), "whyMarked");
  assert.equal(whyNotLearned(loaded(["a"], { learned: [0], source: [255] }), 0), "whyMarked");
});

test("turns begin at recorded tokens, or else behind the marks of a template", () => {
  const texts = [
    "C",
    "<|im_end|>",
    "\n",
    "<|im_start|>",
    "tool",
    "\n",
    "R",
    "<|im_end|>",
    "\n<|im_start|>assistant\nA",
  ];
  const recorded = [
    { role: "assistant", first_token: 0 },
    { role: "tool", first_token: 6 },
    { role: "user", first_token: null },
    { role: "user", first_token: 99 },
  ];
  assert.deepEqual([...turnStarts(loaded(texts, {}, recorded)).keys()], [0, 6]);
  const told = [...turnStarts(loaded(texts, {}))].map(([token, { role }]) => [token, role]);
  assert.deepEqual(told, [
    [0, "assistant"],
    [6, "tool"],
    [8, "assistant"],
  ]);
});

test("each turn begins on a new line, below its head", () => {
  const lines = breakLines(joinTokens(["a", "b\n", "c"], null), 1000, (text) => text.length, new Set([0, 2]));
  const shown = lines.map(({ head, fragments }) => head ?? fragments.map(({ text }) => text).join(""));
  assert.deepEqual(shown, [0, "ab↵", 2, "c"]);
});
