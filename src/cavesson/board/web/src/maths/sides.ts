/** What is compared: runs, or stretches of steps of runs, written as in the address: "first@0-9,first@90-99,second". */

export interface Side {
  run: string;
  /** null = the whole run */
  steps: [first: number, last: number] | null;
}

export function parseSides(text: string): Side[] {
  return text.split(",").flatMap((part): Side[] => {
    const found = /^([^@]+)(?:@(\d+)-(\d+))?$/.exec(part.trim());
    if (!found) return [];
    return [{ run: found[1]!, steps: found[2] === undefined ? null : [Number(found[2]), Number(found[3])] }];
  });
}

export function formatSides(sides: readonly Side[]): string {
  return sides.map(({ run, steps }) => (steps ? `${run}@${steps[0]}-${steps[1]}` : run)).join(",");
}

/** The first two runs; of a single run its first tenth of steps against its last. */
export function usualSides(runs: readonly { run: string; steps: readonly [number, number] | null }[]): Side[] {
  if (runs.length !== 1) return runs.slice(0, 2).map(({ run }) => ({ run, steps: null }));
  const [first, last] = runs[0]!.steps ?? [0, 0];
  const tenth = Math.floor((last - first) / 10);
  return [
    { run: runs[0]!.run, steps: [first, first + tenth] },
    { run: runs[0]!.run, steps: [last - tenth, last] },
  ];
}
