"""Recorded tokens are those of the response: of its text, and none of its prompt."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.reading import Reading
from cavesson.doctor.rules import RULES
from cavesson.doctor.rules.response_tokens import EARLY, LATE, OTHER, prompt_trained, tokens_of_other_text
from cavesson.doctor.rules.system import few_prompts
from cavesson.record import Recorder, write_run, write_vocabulary

TEXTS = ["<|end|>", " one", " two", " three", ".", "=", " four", "\n", "\ufffd", "<|user|>", " five"]
END, DOT, EQUALS, NEWLINE, PIECE, USER = 0, 4, 5, 7, 8, 9
WORDS = [1, 2, 3, 6, 10]
STEPS, BATCH = 4, 8
Change = Callable[[dict[str, Any]], None]


def says(ids: list[int]) -> str:
    return "".join(TEXTS[one] for one in ids if one not in (END, USER))


def responses(change: Change) -> list[list[dict[str, Any]]]:
    """Return responses of four to six words with an end token, each passed through a change."""
    draw = np.random.default_rng(0)
    steps = []
    for _ in range(STEPS):
        step = []
        for _ in range(BATCH):
            prompt = [USER, *draw.choice(WORDS, 3).tolist(), EQUALS]
            ids = [*draw.choice(WORDS, draw.integers(4, 7)).tolist(), DOT, END]
            one = {"prompt_ids": prompt, "ids": ids, "prompt": says(prompt), "text": says(ids).strip()}
            change(one)
            step.append(one)
        steps.append(step)
    return steps


def recorded(folder: Path, steps: list[list[dict[str, Any]]], vocabulary: bool = True, ids: bool = True) -> RunData:
    write_run(folder, {"eos_token_ids": [END]})
    if vocabulary:
        write_vocabulary(folder, TEXTS, TEXTS)
    with Recorder(folder) as recorder:
        for number, step in enumerate(steps):
            rows = {"prompt": [one["prompt"] for one in step], "response": [one["text"] for one in step]}
            rows |= {"reward": [0.0] * len(step)}
            if ids:
                rows["prompt_ids"] = [one["prompt_ids"] for one in step]
            tokens = {"token_id": [one["ids"] for one in step]}
            for name in ("advantage", "learned"):
                if name in step[0]:
                    tokens[name] = [one[name] for one in step]
            recorder.rollouts(number, rows, tokens)
    return RunData(cavesson.open(folder))


def read(rule: Any, data: RunData) -> Reading:
    found: Reading = rule.statistic(data)
    return found


def also(**values: Any) -> Change:
    return lambda one: one.update({name: value(one) if callable(value) else value for name, value in values.items()})


HEALTHY = {
    "as it is": also(),
    "with special tokens": also(text=lambda one: says(one["ids"]) + "<|end|>"),
    "cut at a stop string": also(text=lambda one: one["text"].rpartition(" ")[0]),
    "shortened in a log": also(text=lambda one: one["text"][:12] + "..."),
    "escaped": also(
        ids=lambda one: [one["ids"][0], NEWLINE, one["ids"][1], NEWLINE, *one["ids"][2:]],
        text=lambda one: "\\n".join([says(one["ids"][:1]), says(one["ids"][1:2]), says(one["ids"][2:])]),
    ),
    "an answer alone": also(text=lambda one: says(one["ids"][1:3])),
    "begun by its prompt": also(
        prompt=lambda one: says(one["prompt_ids"][:-1]),
        text=lambda one: says([one["prompt_ids"][-2], *one["ids"]]),
    ),
    "given a start": also(text=lambda one: " four" + says(one["ids"])),
    "with its prompt": also(text=lambda one: one["prompt"] + says(one["ids"])),
    "without its reasoning": also(text=lambda one: says(one["ids"][3:])),
    "without a part in the middle": also(text=lambda one: says([one["ids"][0], *one["ids"][2:]])),
    "cut before its end token": also(ids=lambda one: one["ids"][:3]),
    "of several tokens per character": also(
        ids=lambda one: [PIECE, PIECE, *one["ids"]], text=lambda one: f"é{says(one['ids'])}"
    ),
    "empty": also(text=""),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_what_trainers_do_to_texts_is_no_other_text(name: str, tmp_path: Path) -> None:
    found = read(tokens_of_other_text, recorded(tmp_path / "run", responses(HEALTHY[name])))
    assert found is None if name == "empty" else found.seen == 0.0


SICK = {
    "late": (also(ids=lambda one: one["ids"][1:]), LATE),
    "early": (also(ids=lambda one: [EQUALS, *one["ids"][:-1]]), EARLY),
    "early and cut": (also(ids=lambda one: [EQUALS, *one["ids"][:-3]]), EARLY),
    "another vocabulary": (also(ids=lambda one: [(number + 1) % 7 for number in one["ids"]]), OTHER),
}


@pytest.mark.parametrize("name", SICK)
def test_other_tokens_are_named_with_an_example(name: str, tmp_path: Path) -> None:
    change, what = SICK[name]
    found = read(tokens_of_other_text, recorded(tmp_path / "run", responses(change)))
    assert found.unhealthy and found.seen > 0.9 and found.since == 0 and found.evidence
    assert found.words["what"] == what and found.words["text"] != found.words["decoded"]


def test_tokens_of_the_next_row_are_other_ones_from_the_step_on_where_they_are(tmp_path: Path) -> None:
    steps = responses(also())
    for step in steps[1:]:
        ids = [one["ids"] for one in step]
        for one, others in zip(step, [*ids[1:], ids[0]], strict=True):
            one["ids"] = others
    found = read(tokens_of_other_text, recorded(tmp_path / "run", steps))
    assert found.unhealthy and found.since == 1 and found.words["what"] == OTHER


def test_nothing_is_said_without_a_vocabulary(tmp_path: Path) -> None:
    assert tokens_of_other_text.statistic(recorded(tmp_path / "run", responses(SICK["late"][0]), False)) is None


def with_prompt(**columns: Callable[[int, int], list[Any]]) -> Change:
    """Put the prompt in front of the tokens; columns are functions of the numbers of tokens of both."""

    def change(one: dict[str, Any]) -> None:
        count = len(one["prompt_ids"]), len(one["ids"])
        one.update({name: column(*count) for name, column in columns.items()})
        one["ids"] = one["prompt_ids"] + one["ids"]

    return change


LEARNS = {
    "advantages": ({"advantage": lambda before, after: [0.5] * (before + after)}, True),
    "a mask of the end token alone": ({"learned": lambda before, after: [True] * (before + after - 1) + [False]}, True),
    "advantages of the response": ({"advantage": lambda before, after: [0.0] * before + [0.5] * after}, False),
    "a mask of the response": ({"learned": lambda before, after: [False] * before + [True] * after}, False),
}


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("name", LEARNS)
def test_prompts_are_trained_on_where_mask_or_advantages_cover_them(name: str, ids: bool, tmp_path: Path) -> None:
    columns, is_sick = LEARNS[name]
    found = read(prompt_trained, recorded(tmp_path / "run", responses(with_prompt(**columns)), ids=ids))
    assert found.unhealthy == is_sick and found.seen == float(is_sick) and found.undecided is None
    # With the user's mark, three words and a sign: five tokens; the mark has no text.
    assert not is_sick or found.words["tokens"] == 5.0


def test_a_record_of_whole_sequences_without_a_mask_decides_nothing(tmp_path: Path) -> None:
    data = recorded(tmp_path / "run", responses(with_prompt()))
    found = read(prompt_trained, data)
    assert not found.unhealthy and found.undecided is not None
    assert "prompt-trained" in [one.rule for one in diagnose(data, RULES).skipped]


def test_responses_that_repeat_a_word_of_the_prompt_are_not_its_tokens(tmp_path: Path) -> None:
    """Each response begins with the last token of its prompt, and so does its text."""

    def repeats(one: dict[str, Any]) -> None:
        one["ids"] = [EQUALS, *one["ids"]]
        one |= {"text": says(one["ids"]), "advantage": [1.0] * len(one["ids"])}

    steps = responses(repeats)
    data = recorded(tmp_path / "run", steps)
    assert read(prompt_trained, data).seen == read(tokens_of_other_text, data).seen == 0.0


@pytest.mark.parametrize("prompts", [2, 8, 9])
def test_few_prompts_are_counted(prompts: int, tmp_path: Path) -> None:
    with Recorder(tmp_path / "run") as recorder:
        for step in range(16):
            asked = [f"What is {(4 * step + place) % prompts}?" for place in range(4)]
            recorder.rollouts(step, {"prompt": asked, "response": ["so"] * 4, "reward": [0.0, 1.0] * 2}, {})
    data = RunData(cavesson.open(tmp_path / "run"))
    found = read(few_prompts, data)
    assert found.seen == prompts and found.unhealthy == (prompts <= 8)
    # Alone it is not a problem: only what it explains makes it a finding.
    assert "few-prompts" not in [one.rule.name for one in diagnose(data, [few_prompts]).findings]
