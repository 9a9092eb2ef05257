import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cavesson.data.examples import Examples, Tokens, load_demonstrations
from cavesson.data.settings import TextSettings
from cavesson.models.tiny import tiny_tokenizer


def written(folder: Path, name: str, texts: Sequence[str]) -> str:
    """Rows of these texts."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def loaded(seed: int = 0, **settings: Any) -> Examples[Tokens]:
    return load_demonstrations(TextSettings.model_validate({"overlong": "drop", **settings}), tiny_tokenizer(), seed)


def texts(examples: Sequence[Tokens]) -> list[str]:
    return [tiny_tokenizer().decode(example.ids[:-1]) for example in examples]


def test_examples_that_are_dropped_are_counted(tmp_path: Path) -> None:
    path = written(tmp_path, "a", ["ab", "x" * 50, "cd", "y" * 50])
    over = "longer than data.max_length = 10 tokens, and dropped"
    assert loaded(path=path, max_length=10).notes() == [f"2 × {over} (first: {path}: row 2)"]
    apart = loaded(path=path, max_length=10, validation=0.25).notes()
    assert apart == [f"held out: 1 × {over} (first: {path}: row 1)", f"1 × {over} (first: {path}: row 2)"]


def test_a_stream_counts_what_is_dropped_as_far_as_it_was_read(tmp_path: Path) -> None:
    path = written(tmp_path, "a", ["x" * 50, *["ab"] * 2500, "y" * 50, *["ab"] * 2500])
    counted = f"× longer than data.max_length = 10 tokens, and dropped (first: {path}: row 1)"
    examples = loaded(path=path, max_length=10, stream=True, shuffle_buffer=1)
    assert examples.notes() == []
    examples.train.take(0, 1)
    assert examples.notes() == [f"1 {counted}"]
    examples.train.take(1, 4000)
    assert examples.notes() == [f"2 {counted}"]
    examples.train.take(4001, 2000)  # the second pass has begun, and drops the same rows again
    assert examples.notes() == [f"2 {counted}"]


def test_a_stream_counts_what_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [{"messages": turns}, {"messages": turns[:1]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    examples = loaded(path=str(path), stream=True, template=template)
    examples.train.take(0, 5)
    assert examples.notes() == [
        f"1 × conversations of fewer than 2 messages are skipped (first: {path} line 2)",
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_the_order_is_that_of_the_settings(tmp_path: Path, stream: bool) -> None:
    path = written(tmp_path, "a", ["a0", "too long", "a2", "a3"])
    common = {"path": path, "max_length": 5, "stream": stream}
    plain = loaded(**common, shuffle=False).train
    assert texts(plain.take(0, 5)) == ["a0", "a2", "a3", "a0", "a2"]
    assert plain.size == 3
    passes = [texts(loaded(seed, **common).train.take(3 * number, 3)) for seed in range(4) for number in range(4)]
    assert all(sorted(one) == ["a0", "a2", "a3"] for one in passes)
    assert len(set(map(tuple, passes))) > 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_mix_takes_from_every_source_by_its_weight(tmp_path: Path, stream: bool) -> None:
    mix = [
        {"path": written(tmp_path, "a", ["a0", "a1"]), "weight": 3},
        {"path": written(tmp_path, "b", ["b0"]), "weight": 1},
    ]
    order = loaded(mix=mix, stream=stream).train
    assert Counter(texts(order.take(0, 80))) == {"a0": 30, "a1": 30, "b0": 20}


def test_a_stream_reads_while_it_is_used(tmp_path: Path) -> None:
    path = written(tmp_path, "a", [f"a{n}" for n in range(5000)])
    order = loaded(path=path, stream=True, shuffle_buffer=2).train
    with Path(path).open("a", encoding="utf-8") as file:
        file.write("this is no JSON")
    assert sorted(texts(order.take(0, 4))) == ["a0", "a1", "a2", "a3"]
