"""Fingerprints of rewards: what changes a number changes them, what does not leaves them as they were."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cavesson.rollout.rewards.fingerprint import object_fingerprints, settings_fingerprints
from cavesson.rollout.rewards.settings import RewardSettings
from cavesson.rollout.rewards.table import Reward

SOURCE = (
    "LIMIT = 3\n\n\ndef polite(prompts, responses, **columns):\n    return [min(LIMIT, len(r)) for r in responses]\n"
)


def of_file(file: Path) -> str:
    return settings_fingerprints([RewardSettings(use=f"{file}:polite")])["polite"]


def of_function(function: Any) -> str:
    return object_fingerprints([Reward("one", function)])["one"]


def defined(source: str, name: str = "polite") -> Any:
    """Return a function defined in a file, as a script defines it: its source can be looked up."""
    space: dict[str, Any] = {"__name__": "a_script"}
    exec(compile(source, "<none>", "exec"), space)
    return space[name]


@pytest.mark.parametrize(
    ("edit", "changes"),
    [
        (("LIMIT = 3", "LIMIT = 4"), True),
        (("len(r)", "len(r) + 1"), True),
        (("return [", "# a remark\n    return ["), False),
        (("\n\n\n", "\n\n\n\n\n"), False),
    ],
)
def test_a_file_is_told_apart_by_what_it_computes(tmp_path: Path, edit: tuple[str, str], changes: bool) -> None:
    file = tmp_path / "reward.py"
    file.write_text(SOURCE)
    before = of_file(file)
    file.write_text(SOURCE.replace(*edit))
    assert (of_file(file) != before) is changes


@pytest.mark.parametrize(
    "line", ["import words", "from words import GOOD", "from deep import words", "import deep.words"]
)
def test_the_users_modules_that_a_file_imports_count(
    tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "deep").mkdir()
    file = tmp_path / "reward.py"
    file.write_text(f"{line}\n{SOURCE}")
    for place in (tmp_path / "words.py", tmp_path / "deep" / "words.py"):
        place.write_text("GOOD = 1\n")
    before = of_file(file)
    for place in (tmp_path / "words.py", tmp_path / "deep" / "words.py"):
        place.write_text("GOOD = 2\n")
    assert of_file(file) != before
    assert "words" not in sys.modules, "a fingerprint runs no code"


def test_installed_modules_and_built_in_rewards_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(f"import json\nimport numpy\nfrom cavesson import Recorder\n{SOURCE}")
    of_file(file)
    assert settings_fingerprints([RewardSettings(use="exact_match"), RewardSettings(use="sentiment")]) == {}


def test_a_model_is_told_apart_by_its_files(tmp_path: Path) -> None:
    weights, note = tmp_path / "model.safetensors", tmp_path / "README.md"
    weights.write_bytes(bytes(5_000_000))
    setting = RewardSettings(use="classifier", options={"path": str(tmp_path)})
    before = settings_fingerprints([setting])
    note.write_text("a note")
    assert settings_fingerprints([setting]) == before
    weights.write_bytes(bytes(4_999_999) + b"\1")  # the last byte
    assert settings_fingerprints([setting]) != before


@pytest.mark.parametrize(
    ("edit", "changes"),
    [(("LIMIT = 3", "LIMIT = 4"), True), (("len(r)", "abs(len(r))"), True), (("polite", "polite"), False)],
)
def test_a_function_is_told_apart_by_its_code_and_the_constants_that_it_names(
    edit: tuple[str, str], changes: bool
) -> None:
    assert (of_function(defined(SOURCE)) != of_function(defined(SOURCE.replace(*edit)))) is changes


def test_functions_that_a_function_calls_count() -> None:
    source = "def count(text):\n    return len(text)\n\n\ndef polite(p, r):\n    return [count(one) for one in r]\n"
    assert of_function(defined(source)) != of_function(defined(source.replace("len(text)", "len(text) + 1")))


def test_lambdas_and_objects_are_told_apart_by_their_numbers() -> None:
    class Scaled:
        def __init__(self, factor: float) -> None:
            self.factor, self.seen = factor, object()

        def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
            return [self.factor] * len(responses)

    first, same, other = of_function(Scaled(1.0)), of_function(Scaled(1.0)), of_function(Scaled(2.0))
    assert first == same != other
    assert of_function(Scaled(1.0).__call__) != of_function(Scaled(2.0).__call__)
    one, two = [lambda p, r: [1.0] * len(r), lambda p, r: [2.0] * len(r)]
    assert of_function(one) != of_function(two)


def test_a_module_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text("raise RuntimeError\n")
    file = tmp_path / "broken_package" / "inner.py"

    def now() -> dict[str, str]:
        return settings_fingerprints([RewardSettings(use="broken_package.inner:polite")])

    file.write_text(SOURCE)
    before = now()
    file.write_text(SOURCE.replace("LIMIT = 3", "LIMIT = 4"))
    assert list(before) == ["polite"] and now() != before
    # Whoever loads the reward says that it is not there.
    assert settings_fingerprints([RewardSettings(use="no_such_package.inner:polite")]) == {}


def test_arguments_that_are_bound_to_a_function_count() -> None:
    polite = defined(SOURCE)
    one, same, other = (of_function(partial(polite, limit=limit)) for limit in (1, 1, 2))
    assert one == same != other
    assert of_function(partial(defined(SOURCE.replace("LIMIT = 3", "LIMIT = 4")), limit=1)) != one
