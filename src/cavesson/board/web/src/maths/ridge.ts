/** Where the rows of a distribution over the run are. */

/** A ridge may reach this many rows up. */
export const REACH = 2.4;

/** The row at a share of the height: a ridge stands on its baseline, and begins at that of the one above it. */
export function rowAt(share: number, count: number, heat: boolean): number {
  return heat ? Math.floor(share * count) : Math.max(0, Math.ceil(share * (count + REACH - 1) - REACH));
}
