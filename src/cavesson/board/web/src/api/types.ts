/** What the server answers, as docs of the API say it. A number that was not measured is null. */

export type Maybe = number | null;
export type Steps = [first: number, last: number];

/** So many rollouts are indexed, of those that the record has; null where a type has it once all are. */
export interface Progress {
  indexed: number;
  of: number;
}

export interface RunSummary {
  run: string;
  name: string;
  path: string;
  /** false until somebody looks at a run of a folder; absent in pages that were saved by earlier versions */
  opened?: boolean;
  algorithm: string | null;
  steps: Steps | null;
  /** the last step with rollouts that were trained on */
  newest: number | null;
  /** without held-out ones */
  rollouts: number;
  held_out: number;
  tokens: number | null;
  live: boolean;
  /** its folder was deleted, moved or renamed */
  gone?: boolean;
  indexed: number;
  partial: Progress | null;
  /** why the index does not grow; null if it does */
  problem: string | null;
  columns: RunColumns;
}

/** What the folder of a run says. */
export interface RunLine {
  run: string;
  name: string;
  path: string;
  state: "training" | "finished" | "stopped" | "broken";
  /** why it cannot be read */
  problem: string | null;
  algorithm: string | null;
  model: string | null;
  seed: Maybe;
  steps: Maybe;
  /** steps that it is to have */
  planned: Maybe;
  /** of the last step, with its 95 % interval */
  reward: Estimate | null;
  /** of held-out prompts at the last evaluation, against before training */
  gain: Estimate | null;
  findings: { error: number; warning: number; note: number; titles: Record<string, string[]> } | null;
  /** those that are not the usual ones */
  settings: Record<string, string | null>;
  /** the same for runs that differ in nothing but the seed; null where no settings are recorded */
  group: string | null;
  /** when something was recorded last, in seconds since 1970 */
  recorded: Maybe;
}

export interface Estimate {
  mean: number;
  low: Maybe;
  high: Maybe;
  count: number;
  step: number;
}

export interface RunTable {
  folders: string[];
  /** the most common value of each setting that differs */
  usual: Record<string, string | null>;
  runs: RunLine[];
}

export interface RunColumns {
  rows: string[];
  texts?: string[];
  tokens: string[];
  parts: string[];
  tools?: string[];
  /** what a filter can ask of a call; empty where none is recorded */
  calls?: string[];
  /** what a filter can ask of what is said in a turn; empty where no turns are recorded */
  spoken?: string[];
  /** names under which rewards were computed again */
  rescored?: string[];
  /** texts of a rollout that a filter can ask of */
  recorded?: string[];
  has_reference?: boolean;
  grouped?: boolean;
}

export interface Rollup {
  count: Maybe[];
  mean: Maybe[];
  sd: Maybe[];
  min: Maybe[];
  max: Maybe[];
  q05: Maybe[];
  q25: Maybe[];
  q50: Maybe[];
  q75: Maybe[];
  q95: Maybe[];
}

export interface Series {
  /** first step of each point */
  step: number[];
  /** first and last step of each point: a long run has several steps to a point */
  steps?: Steps[];
  /** everything there is to ask for */
  names?: {
    metrics: string[];
    rollups: string[];
    /** Cavesson's names of metrics that the trainer calls otherwise */
    called?: Record<string, string>;
    /** what was not logged and follows from the rollouts */
    shares?: string[];
  };
  metrics: Record<string, Maybe[]>;
  rollups: Record<string, Rollup>;
}

export interface Histogram {
  edges: number[];
  counts: number[];
  missing: number;
}

export interface Ridge {
  edges: number[];
  steps: Steps[];
  counts: number[][];
}

/** Where in the excerpt the search was found, in UTF-16 units. */
export type Hit = [start: number, end: number];

/** One rollout in a table; statistics stand beside these under their own names. */
/** What somebody says of a rollout; `over` prefers it to the one of the step whose sample is the value. */
export interface Label {
  name: "star" | "rating" | "tag" | "note" | "over";
  value: string | number | null;
  author: string;
  time: string | null;
}

/** Labels are absent in pages that were saved by earlier versions. */
export interface Labelled extends RolloutKey {
  labels?: Label[];
}

export interface LabelledRollout extends RolloutKey {
  labels: Label[];
}

export interface Row {
  row: number;
  step: number;
  sample: number;
  group: Maybe;
  split: string | null;
  reward: Maybe;
  parts: Record<string, Maybe>;
  finish_reason: string | null;
  prompt: string;
  /** names the prompt in every run; absent in pages that were saved by earlier versions */
  prompt_id?: string | null;
  response: string;
  /** the start of what the policy said last; null where the turns are unknown */
  answer?: string | null;
  /** by tool its calls, and those that failed */
  tools?: Record<string, [calls: number, failed: number]> | null;
  hit: Hit | null;
  /** the turn that the excerpt is of; null where it is of the response */
  hit_turn?: { turn: number; role: string; name: string | null; part: string } | null;
  /** where the excerpt starts in the whole text */
  excerpt_start?: number;
  labels: Label[];
  [statistic: string]: unknown;
}

export interface Rows {
  /** of the rollout that was asked for; null if it is not among them */
  place?: number | null;
  /** how many there are; while hits are being verified, how many are so far */
  total: number;
  /** hits are still being verified */
  at_most: boolean;
  /** how many there can be at most */
  most?: number;
  /** why the rest is not looked at */
  stopped?: string | null;
  partial?: Progress | null;
  /** how many of the other split match where none of this one does */
  left_out?: number;
  /** null where the filter chooses it */
  split?: string | null;
  offset: number;
  rows: Row[];
}

export interface Hits {
  step: number[];
  rows: number[];
  hits: number[];
  /** hits are still being verified */
  at_most: boolean;
  /** why the rest is not looked at */
  stopped?: string | null;
}

export interface TokenColumn {
  name: string;
  dtype: "float32" | "int32" | "uint8";
  offset: number;
}

export interface RolloutKey {
  step: number;
  sample: number;
}

/** A turn of an episode; a call and its result are one, of the role tool. */
export interface Turn {
  role: string;
  text: string | null;
  name?: string | null;
  arguments?: string | null;
  /** position of its first token */
  first_token?: Maybe;
  tokens?: Maybe;
  seconds?: Maybe;
  error?: string | null;
  reward?: Maybe;
  /** whether marks in the text say that all of it is thinking */
  thinking?: boolean;
}

export interface Rollout extends Row {
  /** empty where the turns are unknown; absent in pages that were saved by earlier versions */
  conversation?: Turn[];
  /** of the parts in the reward */
  weights: Record<string, number>;
  /** that rewards gave, by their parts */
  reasons: Record<string, string>;
  ref_response: string | null;
  ref_reward: Maybe;
  ground_truth: string | null;
  extra: string | null;
  siblings: (RolloutKey & { reward: Maybe; length: Maybe })[];
  tokens: { count: number; padding: number; columns: TokenColumn[] } | null;
  prompt_truncated: Maybe;
  response_truncated: Maybe;
  ref_response_truncated: Maybe;
  ground_truth_truncated: Maybe;
  extra_truncated: Maybe;
  previous: RolloutKey | null;
  next: RolloutKey | null;
}

export interface TokenTexts {
  texts: string[];
  /** by token, the bytes of those that are not whole characters */
  bytes: (number[] | null)[] | null;
}

export interface Group {
  /** null where the record has none: prompts are then told apart by their text */
  group: Maybe;
  prompt_id?: string | null;
  prompt: string;
  n: number;
  /** how many of them have no reward */
  unscored: number;
  /** of the rewards of the others */
  mean: Maybe;
  sd: Maybe;
  min: Maybe;
  max: Maybe;
  zero_variance: boolean;
  samples: number[];
  /** at most 64 of its responses */
  rows: (RolloutKey & { reward: number | null; response: string })[];
}

/** A response of a group that is read. */
export interface GroupResponse extends Labelled {
  reward: Maybe;
  /** mean over the tokens that were learned from */
  advantage: Maybe;
  length: Maybe;
  finish_reason: string | null;
  /** scores before weighting, their weights and reasons, by the parts of the reward */
  parts: Record<string, Maybe>;
  weights: Record<string, number>;
  reasons: Record<string, string>;
  /** rewards that were computed again, by name; absent in pages that were saved by earlier versions */
  rescored?: Record<string, Maybe>;
  response: string;
  response_truncated: Maybe;
  /** what is boxed or follows ####, the last number, or the last turn of an episode */
  answer: string | null;
}

export interface GroupDetail {
  total: number;
  ground_truth: string | null;
  responses: GroupResponse[];
  partial?: Progress | null;
}

/** Bounds are null where it is not known how certain the difference is; all is, where there is nothing to compare. */
export type Difference = [mean: number, low: Maybe, high: Maybe] | null;

/** Means, and how much the first is above the second. */
export interface ColumnStatistics {
  selected: Maybe;
  rest: Maybe;
  difference: Difference;
}

/** Of the selected rollouts, and of the rest. */
export interface Share {
  name: string;
  selected: Maybe;
  interval: [number, number] | null;
  rest: Maybe;
  difference: Difference;
}

export interface SelectionStatistics {
  selected: number;
  rest: number;
  columns: Record<string, ColumnStatistics>;
}

/** What takes longer to compute. */
export interface SelectionDetails extends SelectionStatistics {
  steps: [number, number][];
  curves: Record<string, { selected: Maybe[]; rest: Maybe[] }>;
  finish_reasons: Share[];
  tools: Share[];
  /** of a sample of so many responses of either side */
  words: Share[];
  sampled: number;
}

/** What a tool did in a step. */
export interface ToolUse {
  /** empty for calls that name no tool */
  name: string;
  calls: number;
  errors: number;
  usual_error: string | null;
  /** mean of those that were measured */
  seconds: Maybe;
  slowest: Maybe;
  rollouts: number;
  reward_with: Maybe;
  reward_without: Maybe;
}

export interface NeverBeats {
  group: Maybe;
  prompt: string;
  tries: number;
  best_gap: Maybe;
  last_step: number;
  last_sample: number;
}

/** A prompt in a list: how often it was answered, and what the responses earned. */
export interface PromptLine {
  prompt_id: string;
  group: Maybe;
  prompt: string;
  n: number;
  unscored: number;
  /** how many responses solve it; null where that is unknown */
  solved: Maybe;
  mean: Maybe;
  /** the mean of the last step that has it minus that of the first; null where these are the same */
  change: Maybe;
  first_mean: Maybe;
  last_mean: Maybe;
}

export interface Prompts {
  total: number;
  /** the reward from which on a response solves its prompt; null where the rewards do not tell */
  solved_from: Maybe;
  prompts: PromptLine[];
  left_out: number;
  partial?: Progress | null;
}

/** One prompt with all that was answered to it. */
export interface PromptPage extends PromptLine {
  ground_truth: string | null;
  prompt_truncated: Maybe;
  ground_truth_truncated: Maybe;
  solved_from: Maybe;
  /** how many prompts have a lower, and a higher mean reward */
  harder: number;
  easier: number;
  steps: { step: number[]; n: number[]; unscored: number[]; mean: Maybe[]; sd: Maybe[]; min: Maybe[]; max: Maybe[] };
  first: RolloutKey | null;
  last: RolloutKey | null;
  best: RolloutKey | null;
  worst: RolloutKey | null;
  left_out: number;
  partial?: Progress | null;
}

export interface Heat {
  steps: Steps[];
  positions: Steps[];
  mean: Maybe[][];
  count: number[][];
}

export interface Pattern {
  text: string;
  kind: string;
  share: Maybe[];
  first: Maybe;
  last: Maybe;
  growth: Maybe;
  reward_effect: Maybe;
  reward_effect_sd: Maybe;
  reward_effect_interval: [number, number] | null;
  rows: number;
}

export interface Patterns {
  steps: Steps[];
  patterns: Pattern[];
  /** how many there are, those of other pages included */
  total: number;
  left_out?: number;
  partial?: Progress | null;
}

/** What one side answered to a prompt. */
export interface ComparedSide extends RolloutKey {
  run: string;
  /** of the newest response, which is the one shown */
  reward: Maybe;
  /** over all n responses */
  mean: Maybe;
  n: number;
  response: string;
}

/** The prompts that all sides have. */
export interface Comparison {
  /** those with the text that is searched for */
  total: number;
  /** all that the sides have in common; absent in pages that were saved by earlier versions */
  common?: number;
  prompts: { prompt_id?: string; prompt: string; runs: ComparedSide[] }[];
  /** names of settings of the rewards and of parts that differ; if there are any, nothing is ranked */
  rewards_differ: string[];
  /** wins[i][j]: prompts where side i's mean reward is above side j's */
  wins: number[][] | null;
  ties: number[][] | null;
  /** of the share of prompts that side i wins, the bounds of the 95 % interval */
  intervals?: [low: number, high: number][][] | null;
  /** n responses with a reward, and their mean reward */
  sides: { n: number; unscored: number; mean: Maybe }[];
  /** last side minus first, by prompt */
  differences: { edges: number[]; counts: number[] } | null;
}

/** A finding, under the names of `cavesson doctor --json`. */
export interface Finding {
  rule: string;
  severity: "error" | "warning" | "note";
  title: string;
  cause: string;
  since_step: number | null;
  /** it began between these, with a probability of 90 %; null if that was not estimated */
  since_between: Steps | null;
  /** the rollouts to look at, and from which token on */
  evidence: (RolloutKey & { start: number | null })[];
  seen: string;
  /** what the number seen is, and where it is healthy */
  healthy: string;
  fix: string;
  /** what the settings of the fix are called in the run's trainer; null if it is Cavesson, or not known */
  trainer_setting_names: { trainer: string; settings: Record<string, string> } | null;
  source: string;
  /** titles of its consequences */
  explains: string[];
  /** what changed, in words and numbers; this and what follows are absent in files of earlier versions */
  happened?: string;
  /** the rollouts that it is about */
  affected?: { steps: Steps; filter: string; search: string } | null;
  /** a typical response of the last steps before it began, and one that shows it */
  before?: Example | null;
  after?: Example | null;
  /** the settings to change; empty for other trainers than Cavesson */
  change?: { toml: string; flags: string };
}

/** What somebody wrote on a step, or on a curve there. */
export interface Note {
  step: number;
  /** the curve; null for the whole step */
  metric: string | null;
  text: string;
  author: string;
  time: string;
}

export interface Example extends RolloutKey {
  reward: Maybe;
  /** its beginning */
  text: string;
}

/** What the documentation says, by rules. */
export type DiagnosisPages = Record<string, string>;

/** What the doctor says of a run in one language. */
export interface Diagnosis {
  /** how much could not be judged, and how many rules found something; empty in files of earlier versions */
  summary: string;
  /** failures that cannot be excluded, each with what would exclude it */
  not_excluded: [string, string][];
  /** the last step that was examined */
  last_step: number;
  findings: Finding[];
}

/** What the doctor found, by language; null while it has not looked. */
export type Findings = Record<string, Diagnosis> | null;

/** Something was added to a run, or runs have appeared. */
export interface LiveEvent {
  run: string;
  appeared?: string[];
  /** The run was resumed or begun again: steps that were shown may be no part of it any more. */
  restarted: boolean;
}

/** An answer to a query in SQL. */
export interface SqlAnswer {
  columns: string[];
  types: string[];
  rows: unknown[][];
  /** whether there are more lines than were asked for */
  truncated: boolean;
  seconds: number;
}

export interface SqlColumn {
  name: string;
  type: string;
  /** its meaning by language; empty for a metric */
  doc: Record<string, string>;
}

/** What a query can ask a run for. */
export interface SqlTables {
  tables: { name: string; columns: SqlColumn[] }[];
  examples: { name: string; query: string }[];
  limits: { seconds: number; memory: number; lines: number };
}

interface RescoredResponse {
  sample: number;
  recorded: number;
  again: number;
  response: string;
}

/** Recorded rewards beside those that were computed again; null where nothing is judged. */
export interface Rescored {
  rollouts: number;
  /** rollouts that both judge */
  both: number;
  recorded: Difference;
  again: Difference;
  /** how much more the run would have been paid, over those that both judge */
  difference: Difference;
  correlation: Maybe;
  /** pairs of responses to a prompt in a step; those that both rewards tell apart; of these, ordered differently */
  pairs: number;
  ordered: number;
  flipped: number;
  share: Difference;
  all_groups: number;
  flipped_groups: number;
  steps: Steps[];
  curves: Record<"recorded" | "again" | "flipped", Maybe[]>;
  groups: {
    step: number;
    prompt_id: string | null;
    prompt: string;
    /** the recorded reward prefers the first, the other one the second */
    responses: [RescoredResponse, RescoredResponse];
  }[];
  partial?: Progress | null;
}
