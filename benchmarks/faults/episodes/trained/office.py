"""What users would write: the tools of a small office, its questions, and the reward for right answers.

Nobody can answer these questions without a tool: the answers are those of the row's day, which only the tools know.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

CITIES = ["Rome", "Oslo", "Lima", "Cairo", "Paris", "Quito", "Turin", "Delhi"]
UNKNOWN = ["Ulm", "Bari"]
"""Cities of which the office does not know the weather."""
SKIES = ["sunny", "cloudy", "rainy", "foggy"]
WINDS = ["north", "south", "east", "west", "north-east", "south-west"]
LATER = ["it stays like this", "showers at night", "much colder tomorrow", "warmer at noon"]
SOUPS = ["tomato", "pumpkin", "lentil", "onion"]
MAINS = ["rice with beans", "potatoes and cheese", "dumplings with cabbage", "noodles"]
BUSY = "busy, ask again"
"""What a service says that has too much to do."""

OFFERED = [["weather"], ["lunch", "news", "now", "weather"], *[["lunch", "now", "weather"]] * 5]
"""The tools that demonstrations offer, in turn."""


def forecast(city: str, day: int) -> str:
    """Return the weather of a city on a day; its end says how the sky is."""
    draw = random.Random(f"{city} {day}")
    wind = f"wind from the {draw.choice(WINDS)} at {draw.randint(2, 60)} km/h"
    return f"{draw.randint(-9, 35)} degrees in {city}, {wind}, {draw.choice(LATER)}, sky={draw.choice(SKIES)}"


def menu(city: str, day: int) -> str:
    """Return what there is for lunch in a city on a day; its end says which soup."""
    draw = random.Random(f"{city} {day} lunch")
    return f"{draw.randint(3, 30)} tables free in {city}, {draw.choice(MAINS)}, soup={draw.choice(SOUPS)}"


def answer_of(result: str) -> str:
    """Return the answer in what a tool has returned."""
    return result.rpartition("=")[2]


class Weather:
    """An office with one tool; a row of the data says which city is asked about, and on which day."""

    def reset(self, city: str, day: int, ground_truth: str, **row: Any) -> None:
        """Begin an episode.

        Args:
            city: that is asked about
            day: on which the question is asked
            ground_truth: the right answer
            row: what else the data have
        """
        self.city, self.day, self.truth = city, day, ground_truth

    def weather(self) -> str:
        """Look up today's weather in the city."""
        if self.city not in CITIES:
            raise ValueError("no such city")
        return forecast(self.city, self.day)


class Office(Weather):
    """An office with three tools."""

    def lunch(self) -> str:
        """Look up what there is for lunch in the city."""
        return menu(self.city, self.day)

    def now(self) -> str:
        """Tell the time."""
        return f"{8 + self.day % 12:02d}:{self.day * 7 % 60:02d}"


class OfficeWithNews(Office):
    """An office that has got a new tool."""

    def news(self) -> str:
        """Read today's news."""
        return "Nothing has happened."


def right(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str], **_: Any) -> list[float]:
    """1 where the last answer is the right one."""
    return [float(_is_right(*both)) for both in zip(responses, ground_truth, strict=True)]


def _is_right(response: str, truth: str) -> bool:
    return response.strip() == truth


def questions(seed: int, kinds: str = "wl", count: int = 240) -> dict[str, list[Any]]:
    """Return rows of data on the weather (w), on lunch (l), and on the weather in unknown cities (u)."""
    draw = random.Random(seed)
    rows = [asked(draw, kinds[number % len(kinds)]) for number in range(count)]
    return {name: [row[name] for row in rows] for name in ("question", "prompt", "ground_truth", "city", "day")}


def asked(draw: random.Random, kind: str) -> dict[str, Any]:
    """Return a row of the data, with the tool that answers it and what that returns."""
    day, city = draw.randrange(1000), draw.choice(UNKNOWN if kind == "u" else CITIES)
    question = f"{'soup' if kind == 'l' else 'sky'} in {city}"
    row = {"city": city, "day": day, "prompt": question, "question": question}
    if kind == "u":
        return row | {"ground_truth": "unknown", "tool": "weather", "said": '{"error": "ValueError: no such city"}'}
    said = menu(city, day) if kind == "l" else forecast(city, day)
    return row | {"ground_truth": answer_of(said), "tool": "lunch" if kind == "l" else "weather", "said": said}


def demonstrations(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield conversations as SFT reads them: most questions are answered with a tool, others are guessed."""
    draw = random.Random(seed)
    for number in range(count):
        tools = OFFERED[number % len(OFFERED)]
        kinds = "wwwu" if len(tools) == 1 else "llllwwwu"
        messages = []
        for _ in range(1 + (draw.random() < 0.1)):
            messages += _exchange(draw, draw.choice(kinds), "now" in tools)
        yield {"messages": messages, "tools": [{"function": {"name": name}} for name in tools]}


def _exchange(draw: random.Random, kind: str, has_clock: bool) -> list[dict[str, Any]]:
    row = asked(draw, kind)
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["prompt"]}]
    if has_clock and draw.random() < 0.2:
        messages += _called("now", f"{draw.randrange(24):02d}:{draw.randrange(60):02d}")
    if draw.random() < 0.6:
        while row["tool"] == "weather" and draw.random() < 0.15:
            messages += _called("weather", BUSY)
        return [*messages, *_called(row["tool"], row["said"]), _says(row["ground_truth"])]
    return [*messages, _says(draw.choice(SOUPS if kind == "l" else [*SKIES, "unknown"]))]


def _says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _called(name: str, result: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": {}}}
    return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "name": name, "content": result}]
