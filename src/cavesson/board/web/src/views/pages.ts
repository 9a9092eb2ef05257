/** The views by their names. */

import type { JSX } from "preact";
import type { View } from "../state/router";
import { Compare } from "./compare";
import { Overview } from "./overview";
import { Patterns } from "./patterns";
import { PromptView } from "./prompt";
import { Responses } from "./responses";
import { Runs } from "./runs";
import { Settings } from "./settings";
import { Sql } from "./sql";
import { StepView } from "./step";
import { Tokens } from "./tokens";

export const PAGES: Record<View, () => JSX.Element> = {
  runs: Runs,
  overview: Overview,
  step: StepView,
  responses: Responses,
  prompt: PromptView,
  tokens: Tokens,
  patterns: Patterns,
  compare: Compare,
  sql: Sql,
  settings: Settings,
};
