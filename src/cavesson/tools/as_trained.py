"""What tools take over from the run that trained a model: how prompts are read, and how responses are sampled."""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cavesson.config import Settings
from cavesson.config_paths import expanded
from cavesson.data.template import templates_at
from cavesson.errors import UserError
from cavesson.models.settings import StartSettings
from cavesson.models.trained import load_start_tokenizer
from cavesson.record import run_info
from cavesson.rollout.rewards.cleaning import CleaningSettings
from cavesson.rollout.settings import EnvironmentSettings
from cavesson.text.visible import shortened
from cavesson.tools.settings import ResponseSettings, TalkSettings
from cavesson.train.description import began

S = TypeVar("S", bound=Settings)
R = TypeVar("R", bound=ResponseSettings)

_DATA = ("system", "special_tokens", "max_prompt_tokens", "template_options")
_OF_CONVERSATIONS = ("system", "template", "template_options")
_LENGTH = ("max_new_tokens", "random_length")
_SAMPLING = ("temperature", "top_k", "top_p", "min_new_tokens", *_LENGTH)
_CODE = ("use", "tools")


class TrainedBy(NamedTuple):
    """The run that trained a model, or another one whose settings a model is used with."""

    folder: Path
    config: Mapping[str, Any]
    """as run.json has it"""
    conversations: bool | None = None
    """whether the rows of its data were conversations; None if an older run does not say"""
    is_own: bool = True
    """whether it trained the model"""
    inputs: Sequence[str] = ()
    """names of the objects that a program passed"""

    @property
    def is_answered(self) -> bool:
        """Whether the run had tools or an environment."""
        return bool(self.code or {"environment", "tools"} & {*self.inputs})

    @property
    def code(self) -> dict[str, Any]:
        """The names of its environments and tools, as settings; a program may have passed others."""
        environment = self.config.get("environment", {})
        return {name: environment[name] for name in _CODE if environment.get(name)}

    @property
    def is_unknown(self) -> bool:
        """Whether its data may have been conversations without the run saying so. The data is not read to find out."""
        return self.conversations is None and bool(self.config.get("data", {}).get("path"))

    def data(self) -> dict[str, Any]:
        """Return how the run read its data, as far as it does not say which data."""
        trained = self.config.get("data", {})
        found = {name: trained[name] for name in _DATA if trained.get(name) is not None}
        if trained.get("chat") or trained.get("template") or self.conversations:
            found["chat"] = True
            # A run saves the template that it used with its model.
            found["template"] = None if self.is_own else self._template()
        else:
            found = {name: value for name, value in found.items() if name not in _OF_CONVERSATIONS} | {"chat": False}
        return found

    def ends(self) -> dict[str, Any]:
        """Return where the run's responses ended, besides their length."""
        sampling, cut = self.config.get("sampling", {}), self.config.get("cleaning", {}).get("cut", ())
        stop = dict.fromkeys([*sampling.get("stop", ()), *CleaningSettings(cut=tuple(cut)).stop])
        ends = sampling.get("eos_token_ids", ()) if self.is_own else ()  # ids mean something else to other tokenizers
        return {name: tuple(each) for name, each in (("stop", stop), ("eos_token_ids", ends)) if each}

    def sampling(self) -> dict[str, Any]:
        """Return how the run sampled responses."""
        sampling = self.config.get("sampling", {})
        return {name: sampling[name] for name in _SAMPLING if sampling.get(name) is not None}

    def limits(self) -> dict[str, Any]:
        """Return the settings of the run's episodes without the names of code, which only the user may give."""
        environment = self.config.get("environment", {})
        return {name: value for name, value in environment.items() if name not in _CODE and value is not None}

    def date(self) -> datetime | None:
        """Return the time at which the run began, which its chat template writes; None if an older run does not say."""
        return began(self.folder)

    def _template(self) -> str | None:
        template = load_start_tokenizer(StartSettings(path=str(self.folder))).chat_template
        return template if isinstance(template, str) else None


def trained_by(model: str) -> TrainedBy | None:
    """Return the run in a folder, or in the parent of its folder `model`; None if no run trained the model."""
    place = expanded(model)
    folders = [place, *([place.parent] if place.name == "model" else [])]
    folder = next((one for one in folders if (one / "run.json").exists()), None)
    if folder is None:
        return None
    info = run_info(folder)
    config, said, given = info.get("config", {}), info.get("conversations"), info.get("inputs")
    return TrainedBy(
        folder,
        config if isinstance(config, dict) else {},
        said if isinstance(said, bool) else None,
        inputs=given if isinstance(given, list) else (),
    )


def check_answered(runs: Iterable[TrainedBy | None], environment: EnvironmentSettings) -> None:
    """Check that the user names the tools or the environment if runs had some.

    A run's folder may come from a stranger, so the code that it names is never run unasked.

    Raises:
        UserError: one of the runs had some, and the settings name none.
    """
    for run in runs:
        if run is not None and run.is_answered and not environment.is_named:
            code = run.code or {"use": "FILE.py:CLASS"}
            flags = " ".join(f"--environment.{name} {shlex.quote(_as_flag(value))}" for name, value in code.items())
            raise UserError(
                f"{run.folder} was trained with tools or an environment, and their code runs only if you name it: "
                f"add {flags}"
            )


def _as_flag(value: str | Mapping[str, str] | Sequence[str]) -> str:
    """Return names of code as a flag takes them."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(name)} = {json.dumps(one)}" for name, one in value.items()) + "}"
    return value[0] if len(value) == 1 else json.dumps(list(value))


@contextmanager
def at_date_of(run: TrainedBy | None) -> Iterator[None]:
    """Make chat templates that write today's date write that of the run inside the block, as they did in training."""
    with templates_at(None if run is None else run.date()):
        yield


def as_trained(
    model: str, settings: R, run: TrainedBy | None, sampled: TrainedBy | None = None, *, raw: bool = False
) -> tuple[R, str]:
    """Fill settings that were not given with those of the run that trained the model.

    Args:
        model: name, to print.
        settings: those given, which take precedence.
        run: says how prompts are read, and at which texts and tokens responses end; None if there is none.
        sampled: another run, which says how responses are sampled otherwise, so that models are compared alike.
        raw: read prompts as plain text in any case.

    Returns:
        The settings, and a line that says which were taken over. Print it when the model and the data are known to be
        right, so that a mistake is said alone.
    """
    if run is None:
        chat = "conversations" if settings.data.chat else "plain text"
        return settings, f"{model} is not a run: prompts are {chat}, and all settings are the defaults or from flags"
    data = {} if raw else run.data()
    sampling = _fitting(_given(settings, "sampling"), (sampled or run).sampling()) | run.ends()
    limits = (sampled or run).limits() if settings.environment.is_named else {}
    found = {"data": data, "sampling": sampling, "environment": limits}
    now = _filled(settings, {**found, "text": data})
    now.environment.longest(now.sampling.longest)
    return now, _line(model, run, now.data.chat, _taken(settings, found))


def talk_as_trained(model: str, settings: TalkSettings, run: TrainedBy | None) -> tuple[TalkSettings, str | None]:
    """Fill the system message of a conversation, the template's options, and where answers end; as in `as_trained`.

    The line is None if there is no run.
    """
    if run is None:
        return settings, None
    ends, trained = run.ends(), run.data()
    own = {
        name: trained[name]
        for name in ("system", "template_options")
        if trained.get(name) and name not in settings.model_fields_set
    }
    limits = {name: value for name, value in run.limits().items() if name != "max_tokens"}
    found = {"sampling": ends, "environment": limits if settings.environment.is_named else {}}
    now = _filled(settings, found).model_copy(update=own)
    return now, _line(model, run, True, own | _taken(settings, found))


def _filled(settings: S, found: Mapping[str, Mapping[str, Any]]) -> S:
    """Return settings with what was found for some of their groups, except what was given."""
    groups = {}
    for name, values in found.items():
        group = getattr(settings, name, None)
        if group is not None:
            given = _given(settings, name)
            known = {field: value for field, value in values.items() if field in type(group).model_fields}
            if given.get("chat") is False:
                known = {field: value for field, value in known.items() if field not in _OF_CONVERSATIONS}
            groups[name] = type(group).model_validate(known | given) if known else group
    return settings.model_copy(update=groups)


def _given(settings: Settings, name: str) -> dict[str, Any]:
    """Return the values that were given for a group of settings."""
    group = getattr(settings, name)
    return {field: getattr(group, field) for field in group.model_fields_set if name in settings.model_fields_set}


def _fitting(given: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what contradicts the settings that were given, or other ones that were found."""
    left_out: set[str] = set()
    if given.keys() & set(_LENGTH):
        left_out |= {*_LENGTH, "min_new_tokens"}
    if given.get("temperature", found.get("temperature")) == 0:
        left_out |= {"top_k", "top_p"}
    if found.get("random_length") is not None:
        left_out.add("max_new_tokens")
    return {name: value for name, value in found.items() if name not in left_out}


def _taken(settings: Settings, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what was found for groups of settings and was not given, by dotted names; without defaults."""
    return {
        f"{group}.{name}": value
        for group, values in found.items()
        for name, value in values.items()
        if name in (fields := type(getattr(settings, group)).model_fields)
        and name not in _given(settings, group)
        and value != fields[name].default
    }


def _line(model: str, run: TrainedBy, is_chat: bool, taken: Mapping[str, Any]) -> str:
    whose = f"as in {run.folder}" + ("" if run.is_own else ", which it is compared with")
    date = run.date() if is_chat else None
    dates = [] if date is None else [f"template date {date:%Y-%m-%d}"]
    short = {name: shortened(value) if isinstance(value, str) else value for name, value in taken.items()}
    values = [f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in short.items()]
    texts = "conversations" if is_chat else "plain text"
    if run.is_unknown and not is_chat:
        texts += " (set --data.chat if the data of the run were conversations, which it does not say)"
    return "; ".join([f"{model}: prompts are {texts}, {whose}", *dates, *values, "flags override"])
