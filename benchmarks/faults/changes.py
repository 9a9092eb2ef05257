"""What a fault changes of a run before it starts: settings, and functions while it goes on."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


class Changes:
    """A run whose settings and functions can be changed."""

    settings: dict[str, Any]
    patches: list[Any]
    """``unittest.mock.patch`` objects, in force while the run is built and trains."""

    def set(self, path: str, value: Any) -> None:
        """Change a setting by its dotted path."""
        *groups, name = path.split(".")
        place = self.settings
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = value

    def wrap(self, target: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace a function by ``wrapper(original, *its arguments)`` while the run goes on."""
        original = getattr(target, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        self.patches.append(patch.object(target, name, wrapped))


@contextmanager
def patched(run: Changes) -> Iterator[None]:
    """Keep the functions that a fault replaces replaced."""
    with ExitStack() as stack:
        for one in run.patches:
            stack.enter_context(one)
        yield
