"""Notes for the user from the building of a run: what weakens it, or makes it slower than it could be."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from cavesson.algorithms.runs import RolloutRun
from cavesson.data.prompts import PromptSet
from cavesson.data.view import assistant_turn_end
from cavesson.models.mapped import is_mapped
from cavesson.models.policy import Policy
from cavesson.processes import Processes
from cavesson.sampling.responses import Engine


def settings_remarks(settings: RolloutRun, prompts: PromptSet) -> list[str]:
    """Return notes for the user on the prompts, and on settings that weaken the KL penalty."""
    notes = list(prompts.usage)
    for some, name in ((prompts, "prompts"), (prompts.held_out, "held-out prompts")):
        notes += [] if some is None else _prompt_remarks(some, name)
    importance = getattr(settings.algorithm, "importance", 0.0)
    if settings.sampling.max_staleness and not importance:
        notes.append("responses are sampled by older weights, and no importance weights correct for it")
    use = settings.kl_use
    if settings.kl_coef and use and use.weakness:
        notes.append(use.weakness)
    filters = settings.sampling.filters
    if filters:
        notes.append(f"sampling is filtered ({', '.join(filters)}): the KL estimate is wrong and may become negative")
    return notes


def ending_remarks(settings: RolloutRun, tokenizer: PreTrainedTokenizerBase, sampler: Engine) -> list[str]:
    """Return a note for the user if responses go on after the end of the assistant's turn."""
    token = assistant_turn_end(settings.data, tokenizer)
    if token is None or token in sampler.eos.tolist():
        return []
    return [
        f"a turn of the assistant ends with {tokenizer.convert_ids_to_tokens(token)}, which does not end a response: "
        f"responses continue after it up to the length limit; set sampling.eos_token_ids = [{token}]"
    ]


def _prompt_remarks(prompts: PromptSet, name: str) -> list[str]:
    """Return notes on prompts, in which `name` is theirs."""
    overlong, notes = prompts.overlong, list(prompts.notes)
    if overlong:
        rows = ", ".join(str(row + 1) for row in overlong[:10]) + (", …" if len(overlong) > 10 else "")
        count = len(prompts.dropped) + len(prompts)
        notes.append(
            f"{len(overlong)} of {count} {name} are longer than data.max_prompt_tokens and were dropped: rows {rows}"
        )
    return notes


def loading_remarks(role: Any, processes: Processes) -> list[str]:
    """Return a note for the user on models that every process has read as a whole, although they will be sharded."""
    models = {"model": role.model}
    if isinstance(role, Policy):
        models |= {"critic": role.critic, "reference": role.frozen_reference}
    read = [name for name, model in models.items() if model is not None and not is_mapped(model)]
    if processes.mesh is None or not read:
        return []
    return [f"every process reads the whole {' and '.join(read)} before sharding (see Loading in docs/parallel.md)"]
