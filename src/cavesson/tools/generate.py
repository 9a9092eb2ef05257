"""Responses of a model to prompts, without training: `cavesson generate`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from cavesson.data.prompts import PromptSet
from cavesson.errors import UserError, print_error
from cavesson.models.policy import Policy
from cavesson.models.trained import load_trained
from cavesson.processes import Processes
from cavesson.record.files import replacing, write_table
from cavesson.record.write.writable import check_new
from cavesson.rollout.conversation import Conversation
from cavesson.rollout.engines.memory_check import check_embedded
from cavesson.rollout.engines.sampler import Sampler
from cavesson.rollout.environments import Instance
from cavesson.text.visible import visible
from cavesson.tools.as_trained import TrainedBy, as_trained, at_date_of, check_answered, trained_by
from cavesson.tools.settings import GenerateSettings, ResponseSettings, UseSettings
from cavesson.train.prompts import conversation_of, longest_read, prompts_of
from cavesson.train.rollouts import Collector, last_answers
from cavesson.types import Turn

FORMATS = (".jsonl", ".json", ".parquet")


_BATCHES = 4
"""How many batches one call samples if rows that have ended are replaced. More of them leave fewer rows empty; fewer
give the first responses sooner."""


class Questions(NamedTuple):
    """What a model is asked, and what answers it."""

    prompts: PromptSet
    conversation: Conversation | None = None
    """None without tools and environments"""
    run: TrainedBy | None = None
    """whose date chat templates write"""


class Response(NamedTuple):
    """One response."""

    group: int
    """which prompt it answers"""
    prompt: str
    response: str
    """what rewards judge: of an episode, the last turn of the policy"""
    finish_reason: str
    """eos, stop or length; done or turns of an episode that the environment or the limit of turns has ended"""
    tokens: int
    """those that the policy sampled, end tokens included"""
    columns: Mapping[str, Any]
    """all columns of the prompt's row"""
    messages: list[dict[str, Any]] | None = None
    """the conversation that was rendered; of an episode, the whole conversation"""
    world: Instance | None = None
    """the environment of an episode"""
    turns: Sequence[Turn] = ()
    """of an episode"""

    @property
    def facts(self) -> dict[str, Any]:
        """Everything that is written of a response, by name."""
        return {name: value for name, value in self._asdict().items() if name not in ("world", "turns")}


def load_policy(model: str, settings: UseSettings) -> tuple[Policy, PreTrainedTokenizerBase]:
    """Load a trained model for sampling and scoring, or raise a UserError that there is none."""
    loaded, tokenizer = load_trained(model, settings.gguf_file, settings.dtype)
    return Policy(loaded).to(Processes(settings.device).device), tokenizer


def responses(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    questions: Questions,
    settings: ResponseSettings,
    indices: Sequence[int] | None = None,
) -> Iterator[Response]:
    """Yield `settings.samples` responses to every prompt, or to those with the given indices, prompt by prompt.

    The prompts are tokenized with this tokenizer. Response number n uses the same random numbers for every model and
    any selection of prompts.
    """
    prompts, conversation = questions.prompts, questions.conversation
    chosen = range(len(prompts)) if indices is None else indices
    total = len(chosen) * settings.samples
    check_embedded(policy.model, (prompts.ids[index] for index in chosen))
    at_once = min(settings.batch_size, settings.sampling.batch_size or settings.batch_size)
    sampling = settings.sampling.model_copy(update={"batch_size": at_once})
    answered = conversation is not None
    sampler = Sampler(policy, tokenizer, sampling, settings.seed, has_turns=answered)
    longest = longest_read(settings, policy) if answered else max((len(prompts.ids[i]) for i in chosen), default=0)
    sampler.prepare(min(total, at_once * _BATCHES), longest)
    size = at_once * (_BATCHES if sampler.decoding.replaces else 1)
    collector = Collector(prompts, sampler, (), tokenizer, conversation=conversation)
    for start in range(0, total, size):
        rows = range(start, min(start + size, total))
        groups = [row // settings.samples for row in rows]
        with at_date_of(questions.run):
            rollouts = collector.generate([chosen[group] for group in groups], 0, rows)
        lengths, answers = rollouts["learned"].sum(1).long().tolist(), last_answers(rollouts)
        for n, group in enumerate(groups):
            columns = {name: values[chosen[group]] for name, values in prompts.columns.items()}
            asked = prompts.messages[chosen[group]] if prompts.messages else None
            told = (rollouts.prompt[n], answers[n], rollouts.finish_reason[n], lengths[n], columns)
            played = (rollouts.messages[n], rollouts.worlds[n], rollouts.turns[n]) if answered else (asked,)
            yield Response(group, *told, *played)


def questions_of(
    settings: ResponseSettings,
    tokenizer: PreTrainedTokenizerBase,
    run: TrainedBy | None,
    given: Sequence[str] | None = None,
) -> Questions:
    """Read the prompts, or those that are given, and load what answers the model.

    Raises:
        UserError: there is no usable prompt, or an environment or a tool cannot be used.
    """
    with at_date_of(run):
        conversation = conversation_of(settings, tokenizer)
        return Questions(prompts_of(settings, tokenizer, conversation, given), conversation, run)


def tell(questions: Questions) -> None:
    """Print what the columns of prompts are used for, and what was skipped."""
    notes = [] if questions.conversation is None else questions.conversation.notes
    for line in (*questions.prompts.usage, *questions.prompts.notes, *notes):
        print_error(visible(line))


def generate(model: str, settings: GenerateSettings) -> Iterator[dict[str, Any]]:
    """Yield prompt, response, finish reason and the other columns of the prompt's row, prompt by prompt.

    The response of an episode is the last turn of the policy; `messages` is the whole conversation, and `turns` what
    follows the prompt, with calls, errors and seconds.

    Raises:
        UserError: there is no such model, or no prompt.
    """
    run = trained_by(model)
    check_answered([] if settings.raw else [run], settings.environment)
    settings, line = as_trained(model, settings, run, raw=settings.raw)
    policy, tokenizer = load_policy(model, settings)
    questions = _questions(settings, tokenizer, run)
    conversation = questions.conversation
    played = {"messages", "turns"} if conversation else set()
    taken = ({"response", "finish_reason"} | played) & set(questions.prompts.columns)
    if taken:
        raise UserError(f"{settings.data.path}: rename the column {min(taken)!r}; the output uses that name")
    print_error(line)
    tell(questions)
    for one in responses(policy, tokenizer, questions, settings):
        sampled: dict[str, Any] = {"prompt": one.prompt, "response": one.response, "finish_reason": one.finish_reason}
        sampled |= {"messages": one.messages, "turns": [turn._asdict() for turn in one.turns]} if conversation else {}
        yield sampled | {name: value for name, value in one.columns.items() if name != "prompt"}
        if conversation is not None and one.world is not None:
            conversation.release([one.world])


def said(row: Mapping[str, Any]) -> str:
    """Return what follows the prompt of a row of `generate`: the response, or one line per turn."""
    if "turns" not in row:
        return str(row["response"])
    lines = []
    for turn in row["turns"]:
        call = "" if turn["name"] is None else f" {turn['name']}({turn['arguments']})"
        lines.append(f"[{turn['role']}{call}] {turn['text']}")
    return "\n".join(["", *lines])


def write(rows: Iterator[dict[str, Any]], out: Path) -> int:
    """Write rows as JSON lines, one JSON list or Parquet, and return their number.

    Raises:
        UserError: the file exists, or its suffix is none of these.
    """
    check_out(out)
    if out.suffix == ".jsonl":
        return _write_lines(rows, out)
    everything = list(rows)
    if out.suffix == ".json":
        with replacing(out) as file:
            file.write(json.dumps(everything, ensure_ascii=False, indent=1, default=str).encode())
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        names = dict.fromkeys(name for row in everything for name in row)
        write_table(out, pa.table({name: _column([row.get(name) for row in everything]) for name in names}))
    return len(everything)


def check_out(out: Path) -> None:
    """Check that a file to write has a name that `write` knows, and does not exist."""
    check_new(out)
    if out.suffix not in FORMATS:
        raise UserError(f"--out {out}: the name must end in {', '.join(FORMATS)}")


def _column(values: list[Any]) -> pa.Array:
    """Return a column of a table; as JSON if values of several types are mixed."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([None if one is None else json.dumps(one, ensure_ascii=False, default=str) for one in values])


def _write_lines(rows: Iterator[dict[str, Any]], out: Path) -> int:
    count = 0
    with replacing(out) as file:
        for row in rows:
            count += 1
            file.write(f"{json.dumps(row, ensure_ascii=False, default=str)}\n".encode())
    return count


def _questions(settings: GenerateSettings, tokenizer: PreTrainedTokenizerBase, run: TrainedBy | None) -> Questions:
    given = (settings.prompt,) if isinstance(settings.prompt, str) else settings.prompt
    if bool(given) == bool(settings.data.path or settings.data.mix):
        raise UserError('give either --prompt "…" or --data.path FILE')
    return questions_of(settings, tokenizer, run, given or None)
