import assert from "node:assert/strict";
import { test } from "node:test";
import { escaped, SvgPen } from "../src/charts/pen";
import { inScript } from "../src/api/snapshot";
import { decoded } from "../src/api/tokens";
import { parseSteps } from "../src/state/selection";
import { formatRoute, parseRoute, patched } from "../src/state/address";
import { csv } from "../src/maths/csv";
import { gist, systemTurn } from "../src/maths/prompt";
import { en } from "../src/i18n/en";
import { vi } from "../src/i18n/vi";
import { zh } from "../src/i18n/zh";
import { preferred } from "../src/i18n/languages";
import { translate } from "../src/i18n/translate";

test("an address is a view and its query, behind any prefix", () => {
  const route = parseRoute("/proxy/6008/responses?run=1&filter=reward+%3E+2&q=%23+%26");
  assert.deepEqual(route, { view: "responses", query: { run: "1", filter: "reward > 2", q: "# &" } });
  assert.deepEqual(parseRoute(formatRoute(route)), route);
  assert.equal(parseRoute("/").view, "overview");
  assert.deepEqual(parseRoute("/index.html"), { view: "overview", query: {} });
  const nonsense = { view: "overview" as const, query: { step: "3" }, unknown: "nonsense" };
  assert.deepEqual(parseRoute("/nonsense?step=3"), nonsense);
  assert.equal(formatRoute(nonsense), "nonsense?step=3");
});

test("a patch sets keys and takes empty ones out", () => {
  assert.deepEqual(patched({ a: "1", b: "2", c: "3" }, { a: 5, b: undefined, c: "", d: "x" }), { a: "5", d: "x" });
});

test("step ranges", () => {
  assert.equal(parseSteps("12"), "12-12");
  assert.equal(parseSteps(" 3 – 40 "), "3-40");
  assert.equal(parseSteps("1,200–12,345"), "1200-12345");
  for (const wrong of ["", "1,20", "x", "9-3", "1-2-3", "-4"]) assert.equal(parseSteps(wrong), null);
});

test("the languages leave the same blanks to fill", () => {
  const blanks = (text: string) =>
    [...text.matchAll(/\{\w+\}/g)]
      .map(([blank]) => blank)
      .sort()
      .join();
  for (const [key, text] of Object.entries(en)) {
    for (const other of [zh, vi]) assert.equal(blanks(other[key as keyof typeof en]), blanks(text), key);
  }
});

test("the browser's first language that the page speaks", () => {
  assert.equal(preferred(["fr-FR", "zh-TW", "en"]), "zh");
  assert.equal(preferred(["fr"]), "en");
});

test("values go where the blanks are, whatever they contain", () => {
  assert.equal(translate(en, "rolloutCount", { count: "$&" }), "$& rollouts");
  assert.equal(translate(en, "rolloutCount", { count: "1" }), "1 rollout");
  assert.equal(translate(en, "rolloutCount", { count: 21 }), "21 rollouts");
  assert.equal(translate(en, "beyondLimits", { count: 1 }).slice(0, 10), "1 token is");
});

test("SVG text cannot leave its element", () => {
  assert.equal(escaped('<script>"&\u0000\ud800'), "&lt;script&gt;&quot;&amp;\ufffd");
  const pen = new SvgPen('a"b');
  pen.text(1, 2, "</text><script>", { colour: "red" });
  const svg = pen.svg(10, 10, "white");
  assert.ok(!svg.includes("<script"));
  assert.ok(svg.includes('font-family="a&quot;b"'));
});

test("token columns are read where they lie", () => {
  const bytes = new ArrayBuffer(2 * 4 + 2 * 4 + 2);
  new Float32Array(bytes, 0, 2).set([0.5, NaN]);
  new Int32Array(bytes, 8, 2).set([7, -1]);
  new Uint8Array(bytes, 16, 2).set([1, 0]);
  const columns = decoded(
    bytes,
    [
      { name: "logprob", dtype: "float32", offset: 0 },
      { name: "token_id", dtype: "int32", offset: 8 },
      { name: "learned", dtype: "uint8", offset: 16 },
    ],
    2,
  );
  assert.deepEqual(Array.from(columns["logprob"]!), [0.5, NaN]);
  assert.deepEqual(Array.from(columns["token_id"]!), [7, -1]);
  assert.deepEqual(Array.from(columns["learned"]!), [1, 0]);
});

test("data in an exported page cannot end its element, and reads back the same", () => {
  const hostile = { "</script><script>alert(1)": "<!--<SCRIPT>\u2028\u2029\ud800\u0000" };
  const text = inScript(JSON.stringify(hostile));
  assert.ok(!/[<\u2028\u2029]/.test(text));
  assert.deepEqual(JSON.parse(text), hostile);
});

test("a table's fields keep what they hold", () => {
  assert.equal(
    csv([
      ["a", 1, null],
      ['say "x"', "b,c", "d\ne"],
    ]),
    'a,1,\r\n"say ""x""","b,c","d\ne"\r\n',
  );
});

test("the system turn of a chat template is found", () => {
  const chat = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n";
  assert.deepEqual(systemTurn(chat), [
    "",
    "<|im_start|>system\nBe kind.<|im_end|>\n",
    chat.slice(chat.indexOf("\n<|") + 1),
  ]);
  const llama = "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST]";
  assert.deepEqual(systemTurn(llama), ["<s>[INST] ", "<<SYS>>\nBe kind.\n<</SYS>>\n\n", "Hi [/INST]"]);
  const header = "<|start_header_id|>system<|end_header_id|>\n\nX<|eot_id|><|start_header_id|>user";
  assert.equal(systemTurn(header)?.[2], "<|start_header_id|>user");
  assert.equal(systemTurn("<|system|>\nX</s>\n<|user|>\nHi")?.[2], "<|user|>\nHi");
  for (const plain of ["", "The system", "<|im_start|>user\nHi<|im_end|>", "<|im_start|>system\nnever closed"]) {
    assert.equal(systemTurn(plain), null);
  }
});

test("a prompt on one line leaves out what the template wrote", () => {
  const chat = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
  assert.equal(gist(chat), "user: Hi assistant:");
  for (const same of ["Write a line.", "<|im_start|>system\nonly this<|im_end|>\n"]) assert.equal(gist(same), same);
});
