"""From settings, and from what a program passes, to the environments of a run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cavesson.errors import UserError
from cavesson.functions import load_function
from cavesson.rollout.environments import Environments, Factory, NoEnvironment
from cavesson.rollout.rewards.fingerprint import of_object, of_source
from cavesson.rollout.settings import EnvironmentSettings

_ALONE = "a single turn: the environment has neither tools nor `user_reply`"


class Given(NamedTuple):
    """What a program passes instead of names of classes and functions."""

    environment: Factory | Mapping[str, Factory] | None = None
    """A class, or another callable that makes environments, or several by name, as TRL's `environment_factory`"""
    tools: Sequence[Callable[..., Any]] = ()


_NOTHING = Given()


def load_environments(settings: EnvironmentSettings, given: Given = _NOTHING) -> Environments:
    """Load the environments and tools of a run.

    Raises:
        UserError: one cannot be loaded or used, or a setting would have no effect.
    """
    factories = _factories(settings, given)
    if not isinstance(given.tools, Sequence) or isinstance(given.tools, str):
        raise UserError(f"tools= takes a list of functions, and not {given.tools!r}")
    functions = [*(load_function(name, "tool") for name in settings.tools), *given.tools]
    if not functions and factories == {None: NoEnvironment}:
        _refuse(settings, EnvironmentSettings.model_fields, "without environment.use or environment.tools")
    environments = Environments(factories, functions)
    kinds = environments.kinds.values()
    speaker = next((one.label for one in kinds if one.speaks), None)
    if speaker is not None and settings.max_turns is None:
        raise UserError(
            f"the environment {speaker} has `user_reply`, so its episodes may never end: set environment.max_turns"
        )
    if not any(one.tools for one in kinds):
        _refuse(settings, ["call_format"], "without tools")
        if speaker is None:
            _refuse(settings, ["max_turns", "max_tokens"], f"on {_ALONE}")
    return environments


def fingerprints(settings: EnvironmentSettings, given: Given) -> dict[str, str]:
    """Return a hash of each environment and tool, by names for messages; nothing is imported."""
    sources = {f"environment {name}".strip(): of_source(use) for name, use in settings.named.items()}
    sources |= {f"tool {use.rpartition(':')[2]}": of_source(use) for use in settings.tools}
    made = given.environment if isinstance(given.environment, Mapping) else {"": given.environment}
    objects = {f"environment {name}".strip(): one for name, one in made.items() if one is not None}
    objects |= {f"tool {getattr(one, '__name__', one)}": one for one in given.tools}
    found = {name: source for name, source in sources.items() if source is not None}
    return found | {name: of_object(one) for name, one in objects.items()}


def _factories(settings: EnvironmentSettings, given: Given) -> dict[str | None, Factory]:
    if settings.use is not None and given.environment is not None:
        raise UserError("environment= and environment.use are two environments; remove one of them")
    if settings.use is None:
        table = given.environment if isinstance(given.environment, Mapping) else {None: given.environment}
        factories = {name: NoEnvironment if one is None else one for name, one in table.items()}
    else:
        names = settings.use if isinstance(settings.use, dict) else {None: settings.use}
        factories = {name: load_function(one, "environment") for name, one in names.items()}
    if not factories or not all(map(callable, factories.values())):
        raise UserError(
            f"environment= takes a class that makes environments, or a mapping of them, and not {given.environment!r}"
        )
    return factories


def _refuse(settings: EnvironmentSettings, names: Iterable[str], why: str) -> None:
    for name in names:
        if getattr(settings, name) != EnvironmentSettings.model_fields[name].default:
            raise UserError(f"environment.{name} has no effect {why}")
