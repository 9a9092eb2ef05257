/** A page saved as one file: the bundle, and the answers the view had used, as JSON. */

import { ApiError } from "./client";
import type { Label } from "./types";
import type { View } from "../state/address";

const ELEMENT = "cavesson-data";

const element = typeof document === "undefined" ? null : document.getElementById(ELEMENT);
interface SavedState {
  route: string;
  labels: Record<string, Label[]>;
  /** those that the answers are for */
  views: readonly View[];
}

interface Saved extends SavedState {
  answers: Record<string, unknown>;
}

const saved: Saved = element
  ? (JSON.parse(element.textContent!) as Saved)
  : { answers: {}, route: "", views: [], labels: {} };

/** Whether this page is an exported file, without a server behind it. */
export const inSnapshot = element !== null;

export async function snapshotAnswer(url: string): Promise<unknown> {
  const answer = saved.answers[url];
  if (answer === undefined) throw new ApiError("not-exported", 410);
  return isBytes(answer) ? fromBase64(answer.base64) : answer;
}

interface Bytes {
  base64: string;
}

function isBytes(answer: unknown): answer is Bytes {
  return typeof answer === "object" && answer !== null && Object.keys(answer).join() === "base64";
}

function fromBase64(text: string): ArrayBuffer {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0)).buffer;
}

function toBase64(bytes: ArrayBuffer): string {
  const array = new Uint8Array(bytes);
  let text = "";
  for (let i = 0; i < array.length; i += 0x8000) text += String.fromCharCode(...array.subarray(i, i + 0x8000));
  return btoa(text);
}

/**
 * The whole HTML file.
 *
 * @param used answers by address
 * @param state where the file opens, its views, and the labels given since the answers came
 */
export async function snapshotPage(used: Map<string, unknown>, state: SavedState): Promise<string> {
  // Other languages and the libraries for Markdown come before the page, which looks for them when it begins.
  const rendered = globalThis.cavessonMarkdown || [...used.keys()].some((url) => url.startsWith("api/diagnosis"));
  const names = ["board.css", "zh.js", "vi.js", ...(rendered ? ["markdown.js"] : []), "board.js"];
  const [style, ...scripts] = await Promise.all(names.map(async (name) => (await fetch(name)).text()));
  const data: Record<string, unknown> = {};
  for (const [url, answer] of used) data[url] = answer instanceof ArrayBuffer ? { base64: toBase64(answer) } : answer;
  const json = inScript(JSON.stringify({ answers: data, ...state }));
  const nonce = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) =>
    byte.toString(16).padStart(2, "0"),
  ).join("");
  const policy = `default-src 'none'; script-src 'nonce-${nonce}'; style-src 'nonce-${nonce}'; img-src data:`;
  return [
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
    `<meta http-equiv="Content-Security-Policy" content="${policy}">`,
    '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Cavesson</title>',
    `<style nonce="${nonce}">${style}</style></head><body><div id="app"></div>`,
    `<script type="application/json" id="${ELEMENT}">${json}</script>`,
    ...scripts.map((one) => `<script nonce="${nonce}">${one.replace(/<\/(script)/gi, "<\\/$1")}</script>`),
    "</body></html>\n",
  ].join("\n");
}

/** JSON that nothing recorded can leave: "<" stands only inside texts there, and \u003c says the same. */
export function inScript(json: string): string {
  return json.replaceAll("<", "\\u003c").replaceAll("\u2028", "\\u2028").replaceAll("\u2029", "\\u2029");
}

export const snapshotRoute = (): string => saved.route;

export const snapshotLabels = (): Record<string, Label[]> => saved.labels;

export const snapshotViews = (): readonly View[] => saved.views;
