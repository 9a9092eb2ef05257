"""Two tools, the reward, and the questions; `python recipes/calculator/calculator.py` writes the data."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

STORIES = (
    ("A box holds {a} eggs. How many eggs are in {b} boxes?", "multiply"),
    ("A ticket costs {a} dollars. How many dollars do {b} tickets cost?", "multiply"),
    ("A train has {a} seats per car and {b} cars. How many seats is that?", "multiply"),
    ("Ann has {a} coins and finds {b} more. How many coins does she have now?", "add"),
    ("A shelf has {a} books, and another one has {b}. How many books are there?", "add"),
    ("It is {a} miles to the lake, and {b} miles on to the town. How many miles is that?", "add"),
)
PLACE = Path(__file__).parent


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a * b


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def right(prompts: Sequence[str], responses: Sequence[str], answer: Sequence[int], **_: Any) -> list[float]:
    """1 where the last answer names the right number, and no other one."""
    numbers = [[word for word in _words(response) if word.isdigit()] for response in responses]
    return [float(found == [str(number)]) for found, number in zip(numbers, answer, strict=True)]


def questions(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield questions with their tool, its arguments and the answer."""
    draws = random.Random(seed)
    for _ in range(count):
        story, tool = draws.choice(STORIES)
        a, b = draws.randint(12, 989), draws.randint(12, 989)
        answer = multiply(a, b) if tool == "multiply" else add(a, b)
        yield {"question": story.format(a=a, b=b), "tool": tool, "a": a, "b": b, "answer": answer}


def demonstration(asked: dict[str, Any], calls: bool) -> dict[str, Any]:
    """Return a conversation in which a question is answered with a tool, or at once."""
    call = {"name": asked["tool"], "arguments": {"a": asked["a"], "b": asked["b"]}}
    used = [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": str(asked["answer"])},
    ]
    answer = {"role": "assistant", "content": f"The answer is {asked['answer']}."}
    return {"messages": [{"role": "user", "content": asked["question"]}, *(used if calls else []), answer]}


def main() -> None:
    """Write demonstrations, and questions of other seeds for training and held out."""
    known = [*questions(0, 400)]
    shown = [demonstration(one, calls=number % 2 == 0) for number, one in enumerate(known)]
    tables: dict[str, list[dict[str, Any]]] = {"demonstrations": shown}
    seen = {one["question"] for one in known}
    for name, seed, count in (("questions", 1, 400), ("held-out", 2, 100)):
        new = [one for one in questions(seed, count) if one["question"] not in seen]
        seen |= {one["question"] for one in new}
        tables[name] = [{"question": one["question"], "answer": one["answer"]} for one in new]
    for name, rows in tables.items():
        (PLACE / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _words(text: str) -> list[str]:
    return [word.strip(".,!?*$") for word in text.split()]


if __name__ == "__main__":
    main()
