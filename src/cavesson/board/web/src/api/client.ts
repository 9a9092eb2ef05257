/** Asks the server, or the data inside an exported page; keeps answers for a while and remembers those in view. */

import { createStore } from "../state/store";
import { progressOf } from "./progress";
import { inSnapshot, snapshotAnswer } from "./snapshot";

export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

export type Parameters = Record<string, string | number | boolean | null | undefined>;

export function address(path: string, parameters: Parameters = {}): string {
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    if (value !== undefined && value !== null && value !== "" && value !== false) search.set(key, String(value));
  }
  const text = search.toString();
  return text ? `api/${path}?${text}` : `api/${path}`;
}

const KEPT = 300;
const answers = new Map<string, Promise<unknown>>();

/** Every answer given since the view was opened, for the export. */
const used = new Map<string, Promise<unknown>>();

/** Whether what is asked for is only expected to be wanted: it is remembered, but no view has used it. */
let early = false;

/** Runs what asks for answers that somebody is about to want; what fails is told to whoever asks again. */
export function inAdvance(ask: () => Promise<unknown> | void): void {
  if (inSnapshot) return;
  early = true;
  try {
    void ask()?.catch(() => undefined);
  } finally {
    early = false;
  }
}

/** A hand that stays somewhere so long means something. */
const REST_MS = 50;

let resting: ReturnType<typeof setTimeout> | undefined;

/** Asks in advance for what the thing under the pointer leads to, once the pointer rests. */
export function onRest(ask: () => Promise<unknown> | void): void {
  clearTimeout(resting);
  resting = setTimeout(() => inAdvance(ask), REST_MS);
}

export function getJson<T>(url: string): Promise<T> {
  return remembered(url, async () => (await request(url)).json()) as Promise<T>;
}

export function getBytes(url: string): Promise<ArrayBuffer> {
  return remembered(url, async () => (await request(url)).arrayBuffer()) as Promise<ArrayBuffer>;
}

function remembered(url: string, ask: () => Promise<unknown>): Promise<unknown> {
  const known = answers.get(url);
  const answer = known ?? (inSnapshot ? snapshotAnswer(url) : ask());
  if (!early) used.set(url, answer);
  if (known) {
    answers.delete(url);
    answers.set(url, known);
    return known;
  }
  answers.set(url, answer);
  const forgetIt = (): void => void (answers.get(url) === answer && answers.delete(url));
  answer.then((given) => progressOf(given) && forgetIt(), forgetIt);
  if (!firstShown && first.push(answer) === 1) queueMicrotask(() => (firstShown = shown(first)));
  if (answers.size > KEPT) answers.delete(answers.keys().next().value!);
  return answer;
}

/** Whether the server has worked on something for longer than a reader should wait without a sign. */
export const slow = createStore(false);

const SLOW_MS = 200;

let pending = 0;
let waiting: ReturnType<typeof setTimeout> | undefined;

function count(change: 1 | -1): void {
  pending += change;
  if (pending === 0) {
    clearTimeout(waiting);
    slow.set(false);
  } else if (pending === 1 && change === 1) {
    waiting = setTimeout(() => slow.set(true), SLOW_MS);
  }
}

/** A window that nobody sees paints no frames. */
const UNSEEN_MS = 300;

/** Comes after the frame that shows what is in the document by now. */
export function painted(): Promise<void> {
  return new Promise((resolve) => {
    requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(resolve)));
    setTimeout(resolve, UNSEEN_MS);
  });
}

/** What is asked for before the script rests for the first time: the runs and their curves. */
const first: Promise<unknown>[] = [];

/** They belong to what is shown first, and wait for nothing, unless the server has to read all rollouts for them. */
const CURVES = /\/series\?(?!names=rows)/;

/** Counts something among what is shown first: the curves of a run that is not known before the runs are. */
export function atFirst(answer: Promise<unknown>): void {
  first.push(answer);
}

/** It is on the screen: until then drawing it needs the cores, and nothing else is asked for. */
let firstShown: Promise<void> | undefined;

async function shown(asked: Promise<unknown>[]): Promise<void> {
  await Promise.allSettled(asked);
  await painted();
}

/** The message of an error, in the place of one in the reader's language. */
export const NO_ANSWER = "no-answer";

async function request(url: string, init: RequestInit = {}): Promise<Response> {
  if (!CURVES.test(url)) await firstShown;
  let response: Response;
  count(1);
  try {
    response = await fetch(url, init);
  } catch {
    throw new ApiError(NO_ANSWER, 0);
  } finally {
    count(-1);
  }
  if (response.ok) return response;
  const body: { error?: string } = await response.json().catch(() => ({}));
  throw new ApiError(body.error ?? `${response.status} ${response.statusText}`, response.status);
}

export async function send(
  method: "PUT" | "DELETE" | "POST",
  url: string,
  body: unknown = {},
  signal: AbortSignal | null = null,
): Promise<unknown> {
  const headers = { "Content-Type": "application/json" };
  const response = await request(url, { method, headers, body: JSON.stringify(body), signal });
  return response.status === 204 ? null : response.json();
}

/** Forgets what a growing run has made stale; whole rollouts never change. */
export function forget(run: string): void {
  const prefix = `api/runs/${run}/`;
  for (const url of answers.keys()) {
    const grows = url.startsWith(prefix) ? !url.includes("/rollouts/") : !url.startsWith("api/runs/");
    if (grows) answers.delete(url);
  }
}

/** Forgets single answers that the reader changed, such as a starred rollout. */
export function forgetMatching(matches: (url: string) => boolean): void {
  for (const url of answers.keys()) if (matches(url)) answers.delete(url);
}

/** What the frame around the views uses stays used. */
export function beginView(): void {
  for (const url of used.keys()) if (!url.endsWith("/findings")) used.delete(url);
}

/** The answers that the present view has used, by address. */
export async function usedAnswers(): Promise<Map<string, unknown>> {
  const found = new Map<string, unknown>();
  for (const [url, answer] of used) found.set(url, await answer.catch(() => undefined));
  return found;
}
