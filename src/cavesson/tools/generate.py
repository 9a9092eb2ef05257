"""Responses of a model to prompts, without training: `cavesson generate`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from cavesson.data.chat import Chat
from cavesson.data.prompts import PromptSet, load_prompts, tokenize
from cavesson.errors import UserError, print_error
from cavesson.models.policy import Policy
from cavesson.models.trained import load_trained
from cavesson.processes import Processes
from cavesson.record.files import replacing, write_table
from cavesson.record.writable import check_new
from cavesson.sampling.room import check_embedded
from cavesson.sampling.sampler import Sampler
from cavesson.text.visible import visible
from cavesson.tools.as_trained import as_trained, at_date_of, check_single_turns, trained_by
from cavesson.tools.settings import GenerateSettings, ResponseSettings, UseSettings
from cavesson.train.rollouts import Collector

FORMATS = (".jsonl", ".json", ".parquet")


_BATCHES = 4
"""How many batches one call samples if rows that have ended are replaced. More of them leave fewer rows empty; fewer
give the first responses sooner."""


class Response(NamedTuple):
    """One response."""

    group: int
    """which prompt it answers"""
    prompt: str
    response: str
    finish_reason: str
    """eos, stop or length"""
    tokens: int
    """its length, end token included"""
    columns: Mapping[str, Any]
    """all columns of the prompt's row"""
    messages: list[dict[str, Any]] | None = None
    """the conversation that was rendered"""


def load_policy(model: str, settings: UseSettings) -> tuple[Policy, PreTrainedTokenizerBase]:
    """Load a trained model for sampling and scoring.

    Raises:
        UserError: there is no such model.
    """
    loaded, tokenizer = load_trained(model, settings.gguf_file, settings.dtype)
    return Policy(loaded).to(Processes(settings.device).device), tokenizer


def responses(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptSet,
    settings: ResponseSettings,
    indices: Sequence[int] | None = None,
) -> Iterator[Response]:
    """Yield `settings.samples` responses to every prompt, prompt by prompt.

    Args:
        policy: the model.
        tokenizer: its tokenizer.
        prompts: prompts tokenized with this tokenizer.
        settings: how to sample.
        indices: indices of the prompts to answer; None means all. Response number n uses the same random numbers for
            every model and any selection of prompts.
    """
    chosen = range(len(prompts)) if indices is None else indices
    total = len(chosen) * settings.samples
    check_embedded(policy.model, (prompts.ids[index] for index in chosen))
    at_once = min(settings.batch_size, settings.sampling.batch_size or settings.batch_size)
    sampling = settings.sampling.model_copy(update={"batch_size": at_once})
    sampler = Sampler(policy, tokenizer, sampling, settings.seed)
    sampler.prepare(min(total, at_once * _BATCHES), max((len(prompts.ids[index]) for index in chosen), default=0))
    size = at_once * (_BATCHES if sampler.decoding.replaces else 1)
    collector = Collector(prompts, sampler, (), tokenizer)
    for start in range(0, total, size):
        rows = range(start, min(start + size, total))
        groups = [row // settings.samples for row in rows]
        rollouts = collector.generate([chosen[group] for group in groups], 0, rows)
        lengths = rollouts["attended"].sum(1).long().tolist()
        for n, group in enumerate(groups):
            columns = {name: values[chosen[group]] for name, values in prompts.columns.items()}
            prompt, response = rollouts.prompt[n], rollouts.response[n]
            messages = prompts.messages[chosen[group]] if prompts.messages else None
            yield Response(group, prompt, response, rollouts.finish_reason[n], lengths[n], columns, messages)


def tell(prompts: PromptSet) -> None:
    """Print what the columns of prompts are used for, and what was skipped."""
    for line in (*prompts.usage, *prompts.notes):
        print_error(visible(line))


def generate(model: str, settings: GenerateSettings) -> Iterator[dict[str, Any]]:
    """Yield prompt, response, finish reason and the other columns of the prompt's row, prompt by prompt.

    Raises:
        UserError: there is no such model, or no prompt.
    """
    run = trained_by(model)
    check_single_turns([] if settings.raw else [run])
    settings, line = as_trained(model, settings, run, raw=settings.raw)
    policy, tokenizer = load_policy(model, settings)
    with at_date_of(run):
        prompts = _prompts(settings, tokenizer)
    taken = {"response", "finish_reason"} & set(prompts.columns)
    if taken:
        raise UserError(f"{settings.data.path}: rename the column {min(taken)!r}; the output uses that name")
    print_error(line)
    tell(prompts)
    for one in responses(policy, tokenizer, prompts, settings):
        sampled = {"prompt": one.prompt, "response": one.response, "finish_reason": one.finish_reason}
        yield sampled | {name: value for name, value in one.columns.items() if name != "prompt"}


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


def _prompts(settings: GenerateSettings, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    given = (settings.prompt,) if isinstance(settings.prompt, str) else settings.prompt
    if bool(given) == bool(settings.data.path or settings.data.mix):
        raise UserError('give either --prompt "…" or --data.path FILE')
    if given:
        return tokenize(given, tokenizer, settings.data.max_prompt_tokens, chat=Chat.of(settings.data, tokenizer))
    return load_prompts(settings.data, tokenizer)
