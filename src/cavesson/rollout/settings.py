"""Settings of environments and tools, and the limits of an episode."""

from collections import Counter
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from cavesson.config import ONE_OR_SEVERAL, Settings, SettingsError
from cavesson.config_paths import FunctionName, full_function
from cavesson.plugins import located


class EnvironmentSettings(Settings):
    """The environment and the tools of an episode, and its limits."""

    use: str | dict[str, str] | None = None
    """your class, as file.py:Class or package.module:Class, or a table of several by name, from which the column
    `environment` of the data chooses; none = no environment"""
    tools: Annotated[tuple[FunctionName, ...], ONE_OR_SEVERAL] = ()
    """functions that the model may call, as file.py:function or package.module:function, with or without an
    environment"""
    max_turns: int | None = Field(None, ge=1)
    """most turns of the assistant in an episode; none = no limit"""
    max_tokens: int | None = Field(None, ge=1)
    """most tokens of an episode after the first prompt, those of tools and of the user included; none = no limit"""
    concurrency: int = Field(32, ge=1)
    """episodes that call tools at the same time"""
    timeout: float = Field(30.0, gt=0)
    """seconds that a call of a tool, or of a method of the environment, may take"""
    call_format: Literal["hermes", "llama3", "mistral"] | None = None
    """how the model writes calls, if neither its tokenizer nor its chat template says so"""

    @field_validator("use", mode="before")
    @classmethod
    def _full_names(cls, use: Any) -> Any:
        names = use if isinstance(use, dict) else {} if use is None else {"": use}
        named = {key: full_function(one) for key, one in names.items()}
        named = {key: located("environments", one) for key, one in named.items() if isinstance(one, str)}
        if use == {} or len(named) < len(names) or any(not one.rpartition(":")[0] for one in named.values()):
            raise ValueError("write file.py:Class, package.module:Class or a name of an installed package, or a table")
        return named if isinstance(use, dict) else named.get("", use)

    @field_validator("tools")
    @classmethod
    def _functions(cls, tools: tuple[str, ...]) -> tuple[str, ...]:
        tools = tuple(located("tools", one) for one in tools)
        if any(not one.rpartition(":")[0] for one in tools):
            raise ValueError("write file.py:function, package.module:function or a name of an installed package")
        return tools

    @property
    def named(self) -> dict[str, str]:
        """The environments by their names in the data; the name of a single one is empty."""
        return self.use if isinstance(self.use, dict) else {"": self.use} if self.use else {}

    @property
    def is_named(self) -> bool:
        """Whether the settings name an environment or a tool."""
        return bool(self.use or self.tools)

    def longest(self, turn: int) -> int:
        """Return the most tokens of an episode after its first prompt, whose turns have at most `turn` tokens.

        Raises:
            SettingsError: an episode may have fewer than one turn.
        """
        if self.max_tokens is not None and self.max_tokens < turn:
            raise SettingsError(
                f"environment.max_tokens {self.max_tokens} is less than the {turn} tokens of one turn "
                "(sampling.max_new_tokens)"
            )
        return self.max_tokens or turn

    @model_validator(mode="after")
    def _check(self) -> Self:
        name, times = next(iter(Counter(one.rpartition(":")[2] for one in self.tools).most_common(1)), ("", 0))
        if times > 1:
            raise ValueError(f"two tools are called {name!r}; rename one of them")
        return self
