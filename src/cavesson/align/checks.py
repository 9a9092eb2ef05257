"""Checks of the stages of a recipe before the first of them runs."""

import json
from collections.abc import Mapping, Sequence

import torch
from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from cavesson.algorithms.runs import ExampleRun
from cavesson.align.stages import ComparisonSettings, ComparisonStage, Stage, StageState, TrainingStage, start_of
from cavesson.config import check
from cavesson.data.prompts import load_prompts
from cavesson.errors import UserError
from cavesson.integrations.trackers import require
from cavesson.models.settings import StartSettings
from cavesson.models.trained import load_start_tokenizer
from cavesson.record import run_info
from cavesson.rollout.rewards.settings import RewardSettings
from cavesson.rollout.rewards.table import build_rewards, rehearse
from cavesson.train.build import check_place
from cavesson.train.prompts import Columns, conversation_of, prompts_of, tried
from cavesson.train.resuming import flattened


def check_stage(stage: Stage, known: Mapping[str, Stage]) -> None:
    """Raise a UserError if a stage would fail, before anything runs; `known` are the stages of the recipe by name."""
    if isinstance(stage, TrainingStage):
        _check_training(stage, known)
    elif isinstance(stage, ComparisonStage):
        _check_comparison(stage, known)


def _check_training(stage: TrainingStage, known: Mapping[str, Stage]) -> None:
    """Read the data and build the rewards as the run will, except for what needs models still to be trained."""
    settings = stage.settings
    if stage.state is not StageState.NEW:
        config = {**run_info(stage.folder)["config"], "run": stage.folder}
        _check_same(stage, check(type(settings), config, f"{stage.folder}/run.json"))
    if stage.state is StageState.DONE:
        return
    require(settings.trackers)
    for name, start in settings.starts().items():
        if start_of(start.path, known) is None:
            check_place(name, start)
    tokenizer = _tokenizer(stage, known)
    if isinstance(settings, ExampleRun):
        settings.examples(tokenizer)
        return
    conversation = conversation_of(settings, tokenizer)
    prompts = prompts_of(settings, tokenizer, conversation, kind=settings.row_kind)
    with tried(conversation, prompts) as columns:
        _check_rewards(settings.rewards, known, prompts.texts, columns)
    settings.check_signal(bool(settings.rewards or (conversation is not None and conversation.scored)))


def _check_comparison(stage: ComparisonStage, known: Mapping[str, Stage]) -> None:
    """Read the prompts with every model's tokenizer, and build the rewards."""
    if stage.state is StageState.DONE:
        _check_same(stage, _compared(stage))
        return
    settings, data = stage.settings, stage.settings.data
    if settings.prompts is not None:
        data = data.model_copy(update={"path": settings.prompts})
    sets = [load_prompts(data, _tokenizer_of(model, known)) for model in settings.models]
    _check_rewards(settings.rewards, known, sets[0].texts, sets[0].for_rewards)


def _compared(stage: ComparisonStage) -> ComparisonSettings:
    """Return the settings of the existing comparison."""
    written = json.loads(stage.result.read_bytes())
    settings = {**written["settings"], "out": stage.folder}
    if settings["prompts"] is not None:
        settings["data"] = {**settings["data"], "path": None}
    return check(ComparisonSettings, settings, str(stage.result))


def _tokenizer(stage: TrainingStage, known: Mapping[str, Stage]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a stage's model, even if that model is still to be trained."""
    start = start_of(stage.settings.model.path, known)
    return stage.settings.load_tokenizer() if start is None else _tokenizer(start, known)


def _tokenizer_of(model: str, known: Mapping[str, Stage]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, even if the model is still to be trained."""
    start = start_of(model, known)
    return load_start_tokenizer(StartSettings(path=model)) if start is None else _tokenizer(start, known)


def _check_rewards(
    rewards: Sequence[RewardSettings], known: Mapping[str, Stage], prompts: Sequence[str], columns: Columns
) -> None:
    """Build the rewards and call them on the prompts, except reward models that are still to be trained."""
    ready = [r for r in rewards if all(start_of(str(value), known) is None for value in r.options.values())]
    made = build_rewards(ready, torch.device("cpu"))
    rehearse(made, prompts, columns)


def _check_same(stage: Stage, before: BaseModel) -> None:
    """Check that the settings of a started stage are unchanged; raise UserError if one differs."""
    then, now = dict(flattened(before)), dict(flattened(stage.settings))
    name = next((name for name in {**now, **then} if then.get(name) != now.get(name)), None)
    if name is not None:
        raise UserError(
            f"{stage.folder} was started with {name} = {then.get(name)}, and the recipe has {now.get(name)}; "
            "remove that folder and those of the stages that build on it, or undo the change"
        )
