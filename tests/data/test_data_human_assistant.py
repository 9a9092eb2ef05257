import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cavesson.data.human_assistant import parse
from cavesson.data.load import Loaded, load
from cavesson.data.questions import GUESSED
from cavesson.data.settings import ChatSettings
from cavesson.data.types import Demonstration, Pair, Prompt, Turn


def user(text: str) -> Turn:
    return Turn("user", text)


def assistant(text: str) -> Turn:
    return Turn("assistant", text)


def read(folder: Path, kind: type, *rows: dict) -> Loaded:
    file = folder / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load(ChatSettings(path=str(file)), kind)


def text(*said: str) -> str:
    """Turn in the form of HH-RLHF, the human first."""
    return "".join(f"\n\n{('Human', 'Assistant')[n % 2]}: {content}" for n, content in enumerate(said))


words = st.text(st.sampled_from("ab Human:Assistant\n"), max_size=12).filter(
    lambda said: "\n\nHuman:" not in "\n\n" + said and "\n\nAssistant:" not in "\n\n" + said
)


@given(st.lists(words.map(str.strip), max_size=6))
def test_turns_come_back_as_they_were_written(said):
    assert parse(text(*said)) == tuple(Turn(("user", "assistant")[n % 2], words) for n, words in enumerate(said))


def test_a_speaker_stands_after_an_empty_line_only():
    assert parse("\n\nHuman: a\nHuman: b Human: c\n\nAssistant: d") == (user("a\nHuman: b Human: c"), assistant("d"))
    assert parse("Human: a\n\nAssistant: b") == (user("a"), assistant("b"))
    assert parse("nobody speaks") == ()


def test_what_two_conversations_share_is_the_prompt(tmp_path):
    loaded = read(
        tmp_path,
        Pair,
        {"chosen": text("Hi", "Hello", "Why?", "So"), "rejected": text("Hi", "Hello", "Why?", "No")},
        {"chosen": text("Hi", ""), "rejected": text("Hi", "Hello")},
        {"chosen": text("Hi", "same"), "rejected": text("Hi", "same")},
    )
    assert loaded.train == [
        Pair((user("Hi"), assistant("Hello"), user("Why?")), (assistant("So"),), (assistant("No"),)),
        Pair((user("Hi"),), (assistant(""),), (assistant("Hello"),)),
        Pair((user("Hi"),), (assistant("same"),), (assistant("same"),)),
    ]
    assert loaded.notes() == [f"3 × {GUESSED} (first: {tmp_path / 'a.jsonl'} line 1)"]


def test_pairs_that_part_earlier_begin_with_an_answer_of_both(tmp_path):
    loaded = read(
        tmp_path,
        Pair,
        # A different question after the same answer: the answer is still part of what is compared.
        {"chosen": text("Hi", "Hello", "A?", "a"), "rejected": text("Hi", "Hello", "B?", "b")},
        # The chosen conversation goes on.
        {"chosen": text("Hi", "Hello", "A?", "a"), "rejected": text("Hi", "Go")},
        # A last question without an answer.
        {"chosen": text("Hi", "Hello", "A?"), "rejected": text("Hi", "Go")},
        {"chosen": text("Hi", "Hello"), "rejected": text("Ho", "Hello")},
        {"chosen": text("Hi"), "rejected": text("Hi", "Hello")},
        {"chosen": "\n\nAssistant: Hi", "rejected": "\n\nAssistant: Ho"},
    )
    rest = (assistant("Hello"), user("A?"), assistant("a"))
    assert loaded.train == [
        Pair((user("Hi"),), rest, (assistant("Hello"), user("B?"), assistant("b"))),
        Pair((user("Hi"),), rest, (assistant("Go"),)),
        Pair((user("Hi"),), (assistant("Hello"),), (assistant("Go"),)),
    ]
    file = tmp_path / "a.jsonl"
    assert loaded.notes() == [
        f"2 × chosen and rejected differ in more than their last turn (first: {file} line 1)",
        f"3 × {GUESSED} (first: {file} line 1)",
        f"1 × turns after the last answer are dropped (first: {file} line 3)",
        f"1 × pairs that answer different questions are skipped (first: {file} line 4)",
        f"2 × conversations of fewer than 2 messages are skipped (first: {file} line 5)",
    ]


def test_two_turns_in_a_row_stay_and_the_row_is_counted_once(tmp_path):
    row = {"chosen": text("Hi", "Key:\n\nAssistant: 12"), "rejected": text("Hi", "No\n\nAssistant: No!")}
    loaded = read(tmp_path, Pair, row)
    assert loaded.train[0].chosen == (assistant("Key:"), assistant("12"))
    assert loaded.train[0].rejected == (assistant("No"), assistant("No!"))
    assert [note.split(" (")[0] for note in loaded.notes()] == [
        "1 × one speaker has two turns in a row, which some chat templates reject",
        "1 × chosen and rejected differ in more than their last turn",
        f"1 × {GUESSED}",
    ]


def test_the_same_file_gives_demonstrations_and_prompts(tmp_path):
    row = {"chosen": text("Hi", "Hello", "Why?", "So"), "rejected": text("Hi", "Hello", "Why?", "No"), "n": 1}
    asked = (user("Hi"), assistant("Hello"), user("Why?"))
    assert read(tmp_path, Demonstration, row).train == [Demonstration(asked, (assistant("So"),))]
    assert read(tmp_path, Prompt, row).train == [Prompt(asked, row)]


def test_a_prompt_of_its_own_stands_before_both(tmp_path):
    row = {"prompt": text("Hi", ""), "chosen": "Hello", "rejected": "Go"}
    assert read(tmp_path, Pair, row).train == [Pair((user("Hi"),), (assistant("Hello"),), (assistant("Go"),))]
    assert read(tmp_path, Prompt, row).train == [Prompt((user("Hi"),), row)]


def test_texts_and_prompts(tmp_path):
    whole = {"text": text("Hi", "Hello", "Why?", "So")}
    asked = (user("Hi"), assistant("Hello"), user("Why?"))
    assert read(tmp_path, Demonstration, whole).train == [Demonstration(asked[:1], (*asked[1:], assistant("So")))]
    asks = {"prompt": text("Hi", "Hello", "Why?", "")}
    for row in (whole, asks):
        assert read(tmp_path, Prompt, row).train == [Prompt(asked, row)]


def test_other_texts_are_not_taken_for_it(tmp_path):
    for other in ("Human: Hello. Bot: Hi!", "The \n\nHuman: a\n\nAssistant: b"):
        assert read(tmp_path, Demonstration, {"text": other}).train == [Demonstration("", other)]
