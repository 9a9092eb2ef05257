/** How complete the index was from which an answer was made. */

import type { Progress } from "./types";

/** null once everything is indexed, and for answers that need no index */
export const progressOf = (answer: unknown): Progress | null =>
  (answer as { partial?: Progress | null } | null)?.partial ?? null;
