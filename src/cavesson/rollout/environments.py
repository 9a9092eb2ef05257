"""Environments: the user's classes, their instances, and which of them a row of the data is for.

The contract is TRL's: `reset` and, if an environment scores its episodes, `get_reward`; every other public method is a
tool. Beyond TRL, an environment may define `done`, `user_reply` and `turn_rewards`.
"""

import inspect
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cavesson.data.tool_schemas import tool_methods
from cavesson.errors import UserError, user_code
from cavesson.functions import line_of
from cavesson.rollout.tools import Tool, tools_of

Factory = Callable[[], Any]
"""Makes an instance of an environment: its class, usually."""
COLUMN = "environment"
"""The column of the data that names a row's environment, if there are several."""
ANSWER = "answer"
"""The argument of `user_reply`, if it has one: what the policy has just said."""


class NoEnvironment:
    """The environment of episodes without one."""

    async def reset(self, **_: Any) -> None:
        """Do nothing."""


@dataclass(frozen=True, eq=False)
class Kind:
    """One environment of a run: what makes its instances, and what its class defines.

    Attributes:
        name: in the column `environment`; None if the run has only one.
        factory: makes instances.
        probe: an instance, on which the methods are read.
        methods: names of the methods of its class.
        tools: the plain functions, then its public methods in the order of their names, which is TRL's.
    """

    name: str | None
    factory: Factory
    probe: Any
    methods: tuple[str, ...]
    tools: Mapping[str, Tool]

    @classmethod
    def of(cls, name: str | None, factory: Factory, functions: Sequence[Callable[..., Any]]) -> "Kind":
        """Make an instance and read its class.

        Raises:
            UserError: it cannot be made, it lacks `reset`, one of its methods takes arguments that it never gets, or
                one of its tools cannot be one.
        """
        probe = _made(name, factory)
        # Of the class: asking the instance would call its properties.
        methods = tuple(method for method, _ in inspect.getmembers(type(probe), inspect.isfunction))
        public = [getattr(probe, one) for one in tool_methods(type(probe))]
        kind = cls(name, factory, probe, methods, tools_of([*functions, *public]))
        if "reset" not in methods:
            raise UserError(f"the environment {kind.label} has no method `reset`, which begins an episode")
        for one, given in (("get_reward", ()), ("user_reply", (ANSWER,))):
            wanted = kind._parameters(one) if one in methods else []
            if any(_is_required(parameter) and parameter.name not in given for parameter in wanted):
                place = line_of(getattr(probe, one))
                gets = "is called without arguments" if not given else f"gets no argument but {ANSWER!r}"
                raise UserError(f"the environment {kind.label}: {one}{place} {gets}")
        return kind

    @property
    def label(self) -> str:
        """The name of the class, which is the name of its reward."""
        return type(self.probe).__name__

    @property
    def scores(self) -> bool:
        """Whether it scores its episodes."""
        return "get_reward" in self.methods

    @property
    def speaks(self) -> bool:
        """Whether it replies to answers as the user."""
        return "user_reply" in self.methods

    @property
    def hears(self) -> bool:
        """Whether its reply depends on the text of the answer."""
        return self.speaks and any(one.name == ANSWER for one in self._parameters("user_reply"))

    @property
    def rewards_turns(self) -> bool:
        """Whether it says what each turn earned."""
        kind = type(self.probe)  # whose property may need what `reset` sets
        return (
            hasattr(kind, "turn_rewards")
            or hasattr(self.probe, "turn_rewards")
            or ("turn_rewards" in inspect.get_annotations(kind))
        )

    @property
    def wanted(self) -> list[str]:
        """The columns of the data that `reset` cannot do without."""
        return [one.name for one in self._parameters("reset") if _is_required(one)]

    def taken(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a row that `reset` takes; the one that names the environment, only if it asks for it.

        With `**`, it takes all others.
        """
        parameters = self._parameters("reset")
        named = {one.name for one in parameters}
        if any(one.kind is one.VAR_KEYWORD for one in parameters):
            named |= row.keys() - (set() if self.name is None else {COLUMN})
        return {name: value for name, value in row.items() if name in named}

    def instance(self, environment: Any) -> "Instance":
        """Return an instance whose tools are bound to it."""
        own = {name: getattr(environment, name) for name in self.tools if name in self.methods}
        tools = {name: tool._replace(function=own.get(name, tool.function)) for name, tool in self.tools.items()}
        return Instance(self, environment, tools)

    def _parameters(self, method: str) -> list[inspect.Parameter]:
        return [*inspect.signature(getattr(self.probe, method)).parameters.values()]


@dataclass(frozen=True, eq=False)
class Instance:
    """The environment of one episode."""

    kind: Kind
    environment: Any
    """The user's object."""
    tools: Mapping[str, Tool]
    """bound to the object"""


class Environments:
    """The environments of a run by name, or one with the name None, and a pool of their instances.

    An instance is made once and reset for each episode. `functions` are tools of all environments.

    Raises:
        UserError: one cannot be an environment, or one of its tools cannot be one.
    """

    def __init__(self, factories: Mapping[str | None, Factory], functions: Sequence[Callable[..., Any]] = ()) -> None:
        self.kinds = {name: Kind.of(name, factory, functions) for name, factory in factories.items()}
        self._free: dict[str | None, deque[Instance]] = defaultdict(deque)
        for name, kind in self.kinds.items():
            self._free[name].append(kind.instance(kind.probe))

    @property
    def tools(self) -> list[str]:
        """The names of all tools, in their order."""
        return list(dict.fromkeys(name for kind in self.kinds.values() for name in kind.tools))

    def check(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Check that the columns of the data, the prompt among them, are what the environments need.

        Raises:
            UserError: a row does not name an environment, or a `reset` wants a column that the data lack.
        """
        if None not in self.kinds and COLUMN not in columns:
            raise UserError(
                f"the data need a column {COLUMN!r}, which names the environment of each row ({self._names}); "
                f"they have {', '.join(columns)}"
            )
        names = [None] if None in self.kinds else columns[COLUMN]
        for name in names:
            if name not in [*self.kinds]:
                raise UserError(f"the column {COLUMN!r} of the data has {name!r}; the environments are {self._names}")
        for name in dict.fromkeys(names):
            kind = self.kinds[name]
            for one in kind.wanted:
                if one not in columns:
                    raise UserError(
                        f"the environment {kind.label}: reset{line_of(kind.probe.reset)} wants the column {one!r}; "
                        f"the data have {', '.join(columns)}"
                    )

    def of(self, row: Mapping[str, Any]) -> Kind:
        """Return the environment of a row of the data."""
        return self.kinds[None if None in self.kinds else row[COLUMN]]

    def take(self, kind: Kind) -> Instance:
        """Return a free instance, or a new one if none is free.

        Raises:
            UserCodeError: it cannot be made.
        """
        try:
            return self._free[kind.name].popleft()
        except IndexError:  # another thread may have taken the last one since it was looked for
            return kind.instance(_made(kind.name, kind.factory))

    def release(self, instances: Iterable[Instance]) -> None:
        """Give instances back, in which no call is running any more."""
        for one in instances:
            self._free[one.kind.name].append(one)

    @property
    def _names(self) -> str:
        return ", ".join(map(str, self.kinds))


def _made(name: str | None, factory: Factory) -> Any:
    with user_code(f"making the environment {name or getattr(factory, '__name__', factory)}"):
        return factory()


def _is_required(one: inspect.Parameter) -> bool:
    return one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
