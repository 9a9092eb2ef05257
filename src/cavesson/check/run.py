"""All checks of a recipe, cheap ones first."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.check.data import check_examples, check_prompts
from cavesson.check.disk import check_disk, gigabytes
from cavesson.check.environment import check_environments, rows_of
from cavesson.check.precision import check_precision
from cavesson.check.reward import ROWS, examine, read_examples, spread_out, unlearned
from cavesson.check.robustness import attack
from cavesson.check.scoring import TASKS, of_episodes, of_responses, tasks_of
from cavesson.check.settings import check_settings
from cavesson.check.short_run import LESS_MEMORY, NO_MEMORY, Measured, judge, judge_memory, short_run
from cavesson.check.tokens import check_tokens
from cavesson.config import Settings, load
from cavesson.data.prompts import PromptSet, load_prompts
from cavesson.data.settings import AnyDataSettings
from cavesson.errors import UserError, user_code
from cavesson.findings.finding import Finding, Fine, Result, Results, SkippedCheck
from cavesson.integrations.trackers import require
from cavesson.models.device_memory import total_memory
from cavesson.models.load import DTYPES, load_tokenizer, model_folder, with_pad_token
from cavesson.models.parts import row_shape, trunk
from cavesson.models.settings import ModelSettings
from cavesson.plan.largest import LargestRollouts, LargestSequences, largest_rollouts, largest_sequences
from cavesson.plan.recipe import Planned
from cavesson.plan.skeleton import bytes_of, skeleton, weight_bytes
from cavesson.processes import Processes
from cavesson.registry import chosen_by_plan
from cavesson.rollout.rewards.settings import RewardSettings
from cavesson.rollout.rewards.table import Reward, build_rewards, rehearse, score
from cavesson.tools.settings import ScorerSettings
from cavesson.train.by_plan import left_to_plan, with_choices
from cavesson.train.prompts import conversation_of, is_rewarded, prompts_of, tried

if TYPE_CHECKING:
    from cavesson.plan.prediction import Memory

TINY_COST = 2e12
"""Floating-point operations of a short run that nobody needs to be asked about: some ten seconds on one core."""


@dataclass(frozen=True)
class Options:
    """Options of the check itself."""

    memory: float | None = None
    """gigabytes the run may take; None: as many as the machine has"""
    short_run: bool | None = None
    """None: where it costs next to nothing"""
    rollouts: int = 64
    steps: int = 4
    reward: str | None = None
    """examine nothing but this reward"""
    pairs: str | None = None
    """a file to examine the reward with"""


class RewardData(Settings):
    """What a reward is examined with."""

    data: AnyDataSettings = AnyDataSettings()
    device: str | None = None


@dataclass
class Report:
    """The results for one run."""

    name: str
    command: str
    results: list[Result] = field(default_factory=list)
    memory: "Memory | None" = None
    """what is predicted of a GPU's"""
    measured: Measured | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    """the schemas of the tools that the policy may call, with the names of their environments"""

    @property
    def findings(self) -> list[Finding]:
        return [one for one in self.results if isinstance(one, Finding)]


def check_run(plan: Planned, options: Options) -> Report:
    """Check a run that a recipe describes."""
    return _Check(plan, options).report()


def check_reward(flags: Sequence[str], options: Options) -> Report:
    """Examine a reward on its own, with the data of the flags or a file of pairs; without either, raise a UserError."""
    given = load(RewardData, None, flags)
    rewards = ScorerSettings.model_validate({"rewards": options.reward}).rewards
    data = given.data
    if options.pairs is not None:
        data = AnyDataSettings.model_validate({**data.model_dump(exclude_unset=True), "path": options.pairs})
    data = unlearned(data, rewards)
    if data.path is None and not data.mix:
        raise UserError("a reward is examined with responses: give --pairs FILE or --data.path FILE")
    path = rewards[0].options.get("path")
    tokenizer = load_tokenizer("tiny" if path is None else model_folder(str(path)))
    report = Report(options.reward or "reward", "reward")
    made = build_rewards(rewards, Processes(given.device).device)
    report.results += _examined(made, data, tokenizer, rewards)
    report.results += _attacked_alone(made, data, tokenizer, rewards)
    return report


class _Check:
    """The check of one run; later parts use what earlier ones have read."""

    def __init__(self, plan: Planned, options: Options) -> None:
        self.plan, self.options = plan, options
        self.settings: Any = plan.settings
        self.seen = Report(plan.name, plan.command)

    def report(self) -> Report:
        """Do all checks that are possible: if one fails, those that do not depend on it are still done."""
        device = self._try("device", self._environment)
        if not self._try("model", self._model):
            return self.seen
        self._try("settings", self._settings)
        known = self._try("data", self._data) and device
        if known:
            self._try("memory", self._memory)
        made = known
        if isinstance(self.settings, RolloutRun):
            played = known and self._try("environment", self._episodes)
            made = played and self._try("reward", self._rewards)
        failed = any(one.severity == "error" for one in self.seen.findings)
        if made and not failed:
            self._try("short-run", self._short_run)
        else:
            self.seen.results.append(SkippedCheck("short-run", "fix the errors above first"))
        return self.seen

    def _try(self, name: str, part: Any) -> bool:
        """Do one part of the check; a UserError becomes a finding. Return whether the part succeeded."""
        try:
            self.seen.results += part()
        except UserError as error:
            self.seen.results.append(Finding(name, "error", "The run would stop here", str(error), "see the message"))
            return False
        return True

    def _environment(self) -> Results:
        require(self.settings.trackers)
        self.device = Processes(self.settings.model.device).device
        yield Fine("device", str(self.device), "device of the run")
        yield from check_precision(self.settings.model.dtype, self.device)

    def _model(self) -> Results:
        settings: RolloutRun | ExampleRun = self.settings
        tokenizer = settings.load_tokenizer()
        self.tokenizer: PreTrainedTokenizerBase = with_pad_token(tokenizer, settings.model.path)
        self.is_classifier = settings.makes_classifier
        model: Any = skeleton(settings.model, tokenizer, classifier=self.is_classifier)
        self.config: PretrainedConfig = model.config
        self.learns = sum(p.numel() for p in model.parameters() if p.requires_grad)
        whole = skeleton(settings.model, tokenizer, adapters=False)
        body = sum(p.numel() for p in trunk(whole).parameters())
        self.weights = body - whole.get_input_embeddings().weight.numel()  # type: ignore[operator]
        self.least = weight_bytes(model, settings.model) + self.learns * (8 if settings.update.in_backward else 12)
        yield Fine("model", f"{body:,} weights, {self.learns:,} trained", settings.model.path)

    def _settings(self) -> Results:
        random = self.settings.model.path == "tiny" or self.settings.model.new is not None
        for result in check_settings(self.settings, self.weights, random):
            if not (self.plan.begun and result.rule == "run-folder"):
                yield result

    def _data(self) -> Results:
        settings = self.settings = self._by_plan()
        if isinstance(settings, RolloutRun):
            self.conversation = conversation_of(settings, self.tokenizer)
            self.prompts: PromptSet = prompts_of(settings, self.tokenizer, self.conversation, kind=settings.row_kind)
            yield from check_prompts(settings, self.prompts)
            self.largest: Any = largest_rollouts(settings, self.prompts)
            longest = self.largest.prompt + self.largest.response
        else:
            examples = settings.examples(self.tokenizer)
            yield from check_examples(settings, examples)
            self.largest = largest_sequences(settings, examples, row_shape(self.config))
            longest = self.largest.longest
        yield from check_tokens(settings, self.tokenizer, self.config, longest)
        saved = self.learns if self.settings.model.lora else self.weights
        size = DTYPES[self.settings.model.dtype].itemsize
        yield from check_disk(settings, saved * size, self.learns * 12)

    def _by_plan(self) -> Any:
        """Return the settings with what the plan chooses for them, if anything is left to it."""
        if not left_to_plan(self.settings):
            return self.settings
        values, _ = chosen_by_plan(self.settings, self.device)
        return with_choices(self.settings, values)

    def _memory(self) -> Results:
        settings, has = self.settings, self._has
        if self.device.type == "cpu":
            yield _at_least(self.least, has)
            return
        # Imported only now: fake tensors need about 50 MB of libraries.
        from cavesson.plan.memory import example_memory, rollout_memory
        from cavesson.plan.prediction import Place

        place = Place(memory=has)
        if isinstance(settings, RolloutRun):
            rewards = sum(self._reward_bytes())
            memory = rollout_memory(settings, self.largest, self.tokenizer, rewards, place)
        else:
            memory = example_memory(settings, self.largest, self.tokenizer, self.is_classifier, place)
        self.seen.memory = memory
        fits = _fits(memory, has, self.largest)
        yield fits
        if isinstance(fits, Finding) and isinstance(settings, RolloutRun):
            half = self.largest._replace(prompt=max(1, self.largest.prompt // 2))
            less = rollout_memory(settings, half, self.tokenizer, rewards, place).peak
            lengths = [len(ids) for ids in self.prompts.ids]
            yield from _too_long(lengths, self.largest.prompt, half.prompt, memory.peak, less, has)

    @property
    def _has(self) -> int:
        """The bytes that the run may take."""
        limit = self.options.memory
        return int(limit * 2**30) if limit is not None else total_memory(self.device)

    def _reward_bytes(self) -> Iterator[int]:
        for reward in self.plan.rewards:
            if "path" in reward.options:
                settings = ModelSettings(path=str(reward.options["path"]), dtype=reward.options.get("dtype", "float32"))
                yield bytes_of(skeleton(settings, self.tokenizer, classifier=True).parameters())

    def _episodes(self) -> Results:
        if self.conversation is None:
            return
        kinds = self.conversation.environments.kinds.values()
        self.seen.tools = [
            {"environment": kind.name or kind.label, **tool.schema["function"]}
            for kind in kinds
            for tool in kind.tools.values()
        ]
        yield from check_environments(self.conversation, self.prompts)

    def _rewards(self) -> Results:
        planned, conversation = self.plan.rewards, self.conversation
        if len(planned) < len(self.settings.rewards):
            yield SkippedCheck("reward", "an earlier stage has not trained the reward model yet")
            return
        self.rewards = build_rewards(planned, self.device)
        rewarded = is_rewarded(self.rewards, conversation)
        self.settings.check_signal(rewarded)
        if not rewarded:
            return
        with tried(conversation, self.prompts) as columns:
            rehearse(self.rewards, self.prompts.texts, columns)
        yield Fine("reward-scores", "yes", "whether the reward scores an empty and a short response")
        if conversation is None:
            data = AnyDataSettings.model_validate(self.settings.data.model_dump(exclude_unset=True))
            if self.options.pairs is not None:
                data = AnyDataSettings(path=self.options.pairs)
            yield from _examined(self.rewards, unlearned(data, planned), self.tokenizer, planned)
            yield from _attacked(self.rewards, self.prompts, planned)
            return
        for kind in conversation.environments.kinds.values():
            tasks = tasks_of(self.prompts, rows_of(conversation.environments, kind, self.prompts))
            score_of = of_episodes(self.rewards, conversation, kind)
            yield from attack(tasks, kind.tools, score_of, _is_model(planned), reads_text=bool(self.rewards))

    def _short_run(self) -> Results:
        options, settings = self.options, self.settings
        samples = isinstance(settings, RolloutRun)
        if samples and len(self.plan.rewards) < len(settings.rewards):
            return
        cost = short_cost(self.weights, self.largest, options)
        if not options.short_run and (options.short_run is False or cost > TINY_COST):
            how = " without KL penalty" if samples else ", and measures their memory and time"
            yield SkippedCheck("short-run", f"it trains {options.steps} steps{how}; run it with --short-run")
            return
        with user_code("the short run"):
            measured = self.seen.measured = short_run(settings, options.rollouts, options.steps)
        yield from measured.errors
        yield Fine("step-time", f"{measured.seconds:.3g} s", f"of {measured.batch} in the short run, median of steps")
        if self.device.type == "cpu":
            yield from judge_memory(measured, self._has)
        if measured.first is not None:
            yield from judge(measured.first, measured.suggestion, settings)


def short_cost(weights: int, largest: LargestRollouts | LargestSequences, options: Options) -> float:
    """Return the floating-point operations of a short run: for sampling, two scorings and one update, or for updates.

    A forward pass takes 2 operations per weight and token, a backward pass 4 (arXiv:2001.08361, section 2.1).
    """
    if isinstance(largest, LargestSequences):
        return 6.0 * weights * options.steps * largest.passes * largest.rows * largest.width
    return 12.0 * weights * options.steps * options.rollouts * (largest.prompt + largest.response)


def _examined(
    rewards: Sequence[Reward], data: AnyDataSettings, tokenizer: PreTrainedTokenizerBase, of: Sequence[RewardSettings]
) -> Results:
    examples, columns = read_examples(data, tokenizer, ROWS)
    if not examples:
        yield SkippedCheck("reward-examination", "the data has prompts only; give responses with --pairs FILE")
        return

    def totals(rows: Sequence[int], responses: Sequence[str]) -> list[float]:
        of_rows = {name: [values[row] for row in rows] for name, values in columns.items()}
        total = score(rewards, [examples[row].prompt for row in rows], responses, of_rows).total
        return [math.nan if one is None else one for one in total]

    every = totals(range(len(examples)), [one.good for one in examples])
    judged = [row for row, one in enumerate(every) if not math.isnan(one)]
    if len(judged) < len(examples):
        yield Fine("reward-judged", len(judged), f"responses that the reward judges, of {len(examples)} of the data")

    def scored(rows: Sequence[int], responses: Sequence[str]) -> list[float]:
        return totals([judged[row] for row in rows], responses)

    yield from examine([examples[row] for row in judged], scored, learned=_is_model(of))


def _is_model(rewards: Sequence[RewardSettings]) -> bool:
    return any("path" in reward.options for reward in rewards)


def _attacked(rewards: Sequence[Reward], prompts: PromptSet, of: Sequence[RewardSettings]) -> Results:
    tasks = tasks_of(prompts, list(spread_out(len(prompts), TASKS)))
    yield from attack(tasks, {}, of_responses(rewards), _is_model(of))


def _attacked_alone(
    rewards: Sequence[Reward],
    data: AnyDataSettings,
    tokenizer: PreTrainedTokenizerBase,
    of: Sequence[RewardSettings],
) -> Results:
    try:
        prompts = load_prompts(data.model_copy(update={"max_prompt_tokens": sys.maxsize}), tokenizer)
    except UserError as error:
        yield SkippedCheck("reward-attacks", f"the data cannot be read as prompts: {error}")
        return
    yield from _attacked(rewards, prompts, of)


def _too_long(lengths: Sequence[int], longest: int, half: int, peak: int, less: int, has: int) -> Results:
    """Report a prompt length that would fit, assuming linear growth of memory from half the longest prompt to all."""
    if longest == half or peak <= less:
        return
    limit = longest - math.ceil((peak - has) * (longest - half) / (peak - less))
    if limit < 1:
        return
    over = sum(length > limit for length in lengths)
    yield Finding(
        "prompts-to-drop",
        "note",
        "Shorter prompts would fit",
        f"With prompts of up to {limit} tokens, the memory is enough: {over} of {len(lengths)} prompts are longer.",
        f"data.max_prompt_tokens = {limit}",
        longest,
        f"tokens of the longest prompt; at most {limit}",
    )


def _fits(memory: "Memory", has: int, largest: Any) -> Result:
    return Finding(
        "memory",
        "error",
        NO_MEMORY,
        f"The run takes {gigabytes(memory.peak)}: {parts_of(memory)}.",
        LESS_MEMORY,
        gigabytes(memory.peak),
        f"at the peak, during {memory.phase} with {largest.rows} sequences in memory; at most {gigabytes(has)}",
    ).unless(memory.peak <= has)


def _at_least(size: int, has: int) -> Result:
    return Finding(
        "memory",
        "error",
        NO_MEMORY,
        f"Weights, gradients and the optimiser alone take {gigabytes(size)}.",
        'model.lora; a smaller model; model.dtype = "bfloat16"',
        gigabytes(size),
        f"of weights, gradients and optimiser; at most {gigabytes(has)}; --short-run measures the peak",
    ).unless(size <= has)


def parts_of(memory: "Memory") -> str:
    """Describe the parts of the peak memory in words."""
    return ", ".join(f"{name} {gigabytes(size)}" for name, size in memory.parts.items())
