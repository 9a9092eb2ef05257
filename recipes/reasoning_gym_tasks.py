"""Tasks of Reasoning Gym, and its scores as the reward. It needs `pip install 'cavesson[reasoning]'`.

`python recipes/reasoning_gym_tasks.py` writes the files of tasks beside it again, after a change of `TASKS`.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import starmap
from pathlib import Path
from typing import Any

from cavesson.errors import UserError

try:
    import reasoning_gym
except ModuleNotFoundError as error:
    line = f"reasoning_gym_tasks.py needs {error.name}; install it with: pip install 'cavesson[reasoning]'"
    raise (SystemExit if __name__ == "__main__" else UserError)(line) from None

TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"max_terms": 2, "max_digits": 1},
    "products": {"max_digits": 1},
    "gcd": {"max_value": 20},
    "letter_counting": {"min_words": 1, "max_words": 2},
}
"""The datasets of Reasoning Gym that are mixed, and how difficult they are."""
HELD_OUT, TRAINED = 15, 75
"""Tasks of each dataset that are held out, and that are trained on."""


def score(
    prompts: Sequence[str], responses: Sequence[str], answer: Sequence[str], metadata: Sequence[str], **_: Any
) -> dict[str, list[float | None]]:
    """Return 1 where Reasoning Gym gives full marks to the last word of a response, else 0: a part per dataset.

    A part does not judge the tasks of other datasets. What Reasoning Gym gives to wrong answers does not count: for
    many datasets it is a share of 1, such as 1/2 for a 10 where 1 is right.
    """
    parts: dict[str, list[float | None]] = {name: [None] * len(responses) for name in TASKS}
    for row, (response, right, about) in enumerate(zip(responses, answer, metadata, strict=True)):
        entry = {"answer": right, "metadata": json.loads(about)}
        name = entry["metadata"]["source_dataset"]
        parts[name][row] = float(_scorer(name)(_last_word(response), entry) == 1)
    return parts


def _last_word(response: str) -> str:
    return (response.split() or [""])[-1].strip(".,:;!?*()\"'")


@cache
def _scorer(name: str) -> Callable[[str, dict[str, Any]], float]:
    function: Callable[[str, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(name)
    return function


def held_out_and_trained() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Draw the tasks: no question occurs twice, and one of each dataset follows the other."""
    mixed = [task for tasks in zip(*starmap(_different, TASKS.items()), strict=True) for task in tasks]
    return mixed[: HELD_OUT * len(TASKS)], mixed[HELD_OUT * len(TASKS) :]


def _different(name: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    dataset, wanted = reasoning_gym.create_dataset(name, seed=0, **settings), HELD_OUT + TRAINED
    found: dict[str, dict[str, Any]] = {}
    for index in range(100 * wanted):
        task = dataset[index]
        found.setdefault(task["question"].casefold(), task)
        if len(found) == wanted:
            return [*found.values()]
    sys.exit(f"{name}: {len(found)} of {wanted} questions are different; let TASKS allow more, or draw fewer")


def write(file: Path, tasks: Iterable[dict[str, Any]]) -> None:
    """Write rows of question, answer, and metadata: JSON as a text, because every dataset has other keys."""
    rows = [{**task, "metadata": json.dumps(task["metadata"])} for task in tasks]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    for name, tasks in zip(("held-out", "questions"), held_out_and_trained(), strict=True):
        write(Path(__file__).with_name(f"reasoning-gym-{name}.jsonl"), tasks)
