import json
from pathlib import Path

import datasets
import pytest
from pydantic import ValidationError

from cavesson.data.load import load
from cavesson.data.settings import ChatSettings, SourceSettings
from cavesson.data.types import Demonstration, Prompt
from cavesson.errors import UserError


def numbered(folder: Path, name: str, count: int) -> str:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"text": f"{name}{n}"}) + "\n" for n in range(count)), encoding="utf-8")
    return str(file)


def texts(rows: object) -> list[str]:
    return [row.prompt if isinstance(row, Prompt) else row.response for row in rows]


def test_the_last_rows_are_held_out(tmp_path):
    loaded = load(ChatSettings(path=numbered(tmp_path, "a", 10), validation=0.2), Demonstration)
    assert texts(loaded.train) == [f"a{n}" for n in range(8)]
    assert texts(loaded.held_out) == ["a8", "a9"]
    for fraction in (0.01, 0.99):
        with pytest.raises(UserError, match=r"data\.validation = 0\.\d+ of its 10 rows leaves one part empty"):
            load(ChatSettings(path=numbered(tmp_path, "a", 10), validation=fraction), Demonstration)


def test_held_out_rows_of_their_own(tmp_path):
    path, other = numbered(tmp_path, "a", 3), numbered(tmp_path, "b", 2)
    for stream in (False, True):
        loaded = load(ChatSettings(path=path, validation_path=other, stream=stream), Prompt)
        assert texts(loaded.train) == ["a0", "a1", "a2"]
        assert texts(loaded.held_out) == ["b0", "b1"]
    with pytest.raises(UserError, match="has no splits, so there is no 'test'"):
        load(ChatSettings(path=path, validation_split="test"), Prompt)


def test_a_split_is_held_out(tmp_path):
    parts = {"train": datasets.Dataset.from_dict({"q": ["a"]}), "test": datasets.Dataset.from_dict({"q": ["b"]})}
    datasets.DatasetDict(parts).save_to_disk(tmp_path)
    loaded = load(ChatSettings(path=str(tmp_path), validation_split="test", columns={"prompt": "q"}), Prompt)
    assert (loaded.train, loaded.held_out) == ([Prompt("a", {"q": "a"})], [Prompt("b", {"q": "b"})])


def test_only_the_first_rows(tmp_path):
    path = numbered(tmp_path, "a", 5)
    with Path(path).open("a") as out:
        out.write("broken")  # is not read any more
    for stream in (False, True):
        loaded = load(ChatSettings(path=path, max_rows=4, stream=stream), Prompt)
        assert texts(loaded.train) == ["a0", "a1", "a2", "a3"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_mix(tmp_path, stream):
    couplets = tmp_path / "c.csv"
    couplets.write_text("couplet,next\nc0,d0\n", encoding="utf-8")
    mix = (
        SourceSettings(path=numbered(tmp_path, "a", 5), weight=3),
        SourceSettings(path=str(couplets), columns={"prompt": "couplet"}, weight=1),
    )
    loaded = load(ChatSettings(mix=mix, stream=stream), Prompt)
    assert [source.weight for source in loaded.sources] == [3, 1]
    assert [len(list(source.rows)) for source in loaded.sources] == [5, 1]
    assert loaded.train[-1] == Prompt("c0", {"couplet": "c0", "next": "d0"})


def test_every_source_of_a_mix_holds_out_its_share(tmp_path):
    mix = [{"path": numbered(tmp_path, "a", 10)}, {"path": numbered(tmp_path, "b", 5)}]
    loaded = load(ChatSettings.model_validate({"mix": mix, "validation": 0.2}), Prompt)
    assert texts(loaded.held_out) == ["a8", "a9", "b4"]
    assert len(loaded.train) == 12


def test_remarks_are_about_one_pass(tmp_path):
    file = tmp_path / "a.jsonl"
    turns = [{"role": "user", "content": "Hi"}]
    answered = {"messages": [*turns, {"role": "assistant", "content": "Hello"}]}
    file.write_text("\n".join(map(json.dumps, [{"messages": turns}, answered] * 2)), encoding="utf-8")
    loaded = load(ChatSettings(path=str(file), stream=True), Demonstration)
    assert loaded.notes() == []
    remark = f"conversations of fewer than 2 messages are skipped (first: {file} line 1)"
    for _ in range(2):
        next(iter(loaded.sources[0].rows))
        assert loaded.notes() == [f"1 × {remark}"]  # as far as this pass has come
    for _ in range(2):
        assert len(loaded.train) == 2
        assert loaded.notes() == [f"2 × {remark}"]
    next(iter(loaded.sources[0].rows))
    assert loaded.notes() == [f"2 × {remark}"]


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.jsonl", "", "a.jsonl contains no prompts"),
        ("a.json", "[]", "a.json contains no prompts"),
        ("a.txt", "\n \n", "a.txt contains no prompts"),
        ("a.csv", "prompt\n", "a.csv contains no prompts"),
        (
            "a.jsonl",
            '{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}',
            "no prompts: 1 × conversations that do not begin with the user (after the system) are skipped (first: ",
        ),
    ],
)
def test_nothing_usable_is_said(tmp_path, name, content, part):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        load(ChatSettings(path=str(tmp_path / name)), Prompt)
    assert part in str(error.value)


def test_a_path_is_needed():
    with pytest.raises(UserError, match=r"data\.path is missing"):
        load(ChatSettings(), Prompt)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"path": "a", "mix": [{"path": "b"}]}, "path or mix"),
        ({"path": "a", "validation": 0.1, "validation_path": "b"}, "not both"),
        ({"path": "a", "validation": 0.1, "validation_split": "b"}, "not both"),
        ({"path": "a", "validation": 0.1, "stream": True}, "a fraction of a stream"),
        ({"mix": [{"path": "a"}], "validation_split": "b"}, "needs a validation_path"),
        ({"mix": [{"path": "a", "weight": 0}]}, "greater than 0"),
    ],
)
def test_settings_that_contradict_each_other(settings, part):
    with pytest.raises(ValidationError, match=part):
        ChatSettings.model_validate(settings)
