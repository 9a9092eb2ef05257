/** The table of runs: which of them are shown, in which order, and seeds of the same settings put together. */

import type { RunLine, RunTable } from "../api/types";
import type { Maybe } from "./numbers";

export const SORTS = ["run", "state", "steps", "reward", "gain", "findings", "recorded"] as const;
export type Sort = (typeof SORTS)[number];

/** A line of the table: a run, or several that differ in nothing but the seed. */
export interface Line {
  /** of several runs that of the first */
  run: RunLine;
  runs: RunLine[];
  reward: Band | null;
  gain: Band | null;
}

/** A mean with its 95 % interval; of several seeds their mean, with the lowest and the highest. */
export interface Band {
  mean: number;
  low: Maybe;
  high: Maybe;
}

export function linesOf({ runs }: RunTable, together: boolean): Line[] {
  const groups = new Map<string, RunLine[]>();
  for (const run of runs) {
    const key = together && run.group !== null ? `group ${run.group}` : `run ${run.run}`;
    groups.set(key, [...(groups.get(key) ?? []), run]);
  }
  return [...groups.values()].map((some) => ({
    run: some[0]!,
    runs: some,
    reward: bandOf(some.map(({ reward }) => reward)),
    gain: bandOf(some.map(({ gain }) => gain)),
  }));
}

function bandOf(values: (Band | null)[]): Band | null {
  const known = values.filter((value) => value !== null);
  if (known.length <= 1) return values.length === 1 ? values[0]! : (known[0] ?? null);
  const means = known.map(({ mean }) => mean);
  return {
    mean: means.reduce((sum, mean) => sum + mean, 0) / means.length,
    low: Math.min(...means),
    high: Math.max(...means),
  };
}

/** Those in which every word of a text occurs, in any case: in names, settings, states, and titles of findings. */
export function matching(lines: Line[], text: string): Line[] {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return lines.filter(({ runs }) => {
    const all = runs.map(textOf).join("\n").toLowerCase();
    return words.every((word) => all.includes(word));
  });
}

function textOf({ run, name, algorithm, model, state, settings, findings, problem }: RunLine): string {
  const given = Object.entries(settings).map(([key, value]) => `${key}=${value ?? ""}`);
  const titles = Object.values(findings?.titles ?? {}).flat();
  return [run, name, algorithm ?? "", model ?? "", state, problem ?? "", ...given, ...titles].join("\n");
}

const STATES = ["training", "broken", "stopped", "finished"];

/** @param sort a column; with - in front the largest first. What is not known comes last. */
export function sorted(lines: Line[], sort: string): Line[] {
  const down = sort.startsWith("-");
  const by = SORTS.find((name) => name === sort.replace("-", "")) ?? "run";
  if (by === "run") {
    const names = [...lines].sort((a, b) => a.run.run.localeCompare(b.run.run, "en", { numeric: true }));
    return down ? names.reverse() : names;
  }
  const value = (line: Line): number => valueOf(line, by) ?? NaN;
  return [...lines].sort((a, b) => {
    const [one, other] = [value(a), value(b)];
    if (Number.isNaN(one) || Number.isNaN(other)) return Number(Number.isNaN(one)) - Number(Number.isNaN(other));
    return down ? other - one : one - other;
  });
}

function valueOf({ run, runs, reward, gain }: Line, by: Exclude<Sort, "run">): Maybe {
  if (by === "reward") return reward?.mean ?? null;
  if (by === "gain") return gain?.mean ?? null;
  if (by === "state") return STATES.indexOf(run.state);
  if (by === "findings") return sum(runs.map(({ findings }) => (findings ? gravity(findings) : null)));
  const known = runs.map((one) => one[by]).filter((one) => one !== null);
  return known.length > 0 ? Math.max(...known) : null;
}

/** An error outweighs any number of warnings, and a warning any number of notes. */
const gravity = ({ error, warning, note }: { error: number; warning: number; note: number }): number =>
  error * 1e6 + warning * 1e3 + note;

function sum(values: Maybe[]): Maybe {
  const known = values.filter((value) => value !== null);
  return known.length > 0 ? known.reduce((a, b) => a + b, 0) : null;
}

/** How long ago something was, in the largest unit that fits. */
export function ago(seconds: number): [count: number, unit: "s" | "min" | "h" | "d"] {
  if (seconds < 60) return [Math.max(0, Math.floor(seconds)), "s"];
  if (seconds < 3600) return [Math.floor(seconds / 60), "min"];
  if (seconds < 2 * 86_400) return [Math.floor(seconds / 3600), "h"];
  return [Math.floor(seconds / 86_400), "d"];
}
