import pickle
import random
import sys

import pytest

from cavesson.errors import UserCodeError, UserError
from cavesson.functions import load_function

SOURCE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Point:
    score: float

def shortness(prompts, responses, **columns):
    return [-len(response) for response in responses]

not_callable = 3
"""


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text(SOURCE, encoding="utf-8")
    return file


def test_from_a_file(file):
    assert load_function(f"{file}:shortness")(["p"], ["abc"]) == [-3]


def test_what_a_file_defines_can_be_pickled(file):
    point = load_function(f"{file}:Point")(1.5)
    assert pickle.loads(pickle.dumps(point)) == point


def test_a_file_is_executed_once_for_all_of_its_functions_and_again_when_it_has_changed(tmp_path):
    file = tmp_path / "counting.py"
    file.write_text("calls = []\ndef one(p, r):\n    calls.append(1)\ndef seen(p, r):\n    return calls\n")
    one, seen = (load_function(f"{file}:{name}") for name in ("one", "seen"))
    one([], [])
    assert seen([], []) == [1]
    file.write_text("def seen(p, r):\n    return 'changed'\n")
    assert load_function(f"{file}:seen")([], []) == "changed"


def test_files_of_the_same_name_do_not_replace_each_other(tmp_path):
    points = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(SOURCE, encoding="utf-8")
        points.append(load_function(f"{tmp_path / folder / 'same.py'}:Point")(1.5))
    assert pickle.loads(pickle.dumps(points)) == points


def test_from_a_module(file, monkeypatch):
    monkeypatch.syspath_prepend(file.parent)
    assert load_function("my_rewards:shortness")(["p"], ["abc"]) == [-3]
    monkeypatch.delitem(sys.modules, "my_rewards")


def test_a_colon_in_the_folder_is_no_separator(file):
    folder = file.parent / "a:b"
    folder.mkdir()
    (folder / "r.py").write_text(SOURCE, encoding="utf-8")
    assert load_function(f"{folder / 'r.py'}:shortness")([""], ["ab"]) == [-2]


def test_a_file_does_not_take_a_library_s_place(tmp_path):
    file = tmp_path / "random.py"
    file.write_text(SOURCE, encoding="utf-8")
    load_function(f"{file}:shortness")
    assert sys.modules["random"] is random


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("{folder}/nowhere.py:shortness", "there is no such file"),
        ("{folder}/my_rewards.py:longness", "my_rewards.py has no function 'longness'"),
        ("{folder}/my_rewards.py:not_callable", "my_rewards.py has no function 'not_callable'"),
        (
            "no_such_module_here:shortness",
            "module no_such_module_here raised ModuleNotFoundError: No module named 'no_such_module_here'",
        ),
        ("shortness", "write file.py:function or module:function"),
        ("math:no_such_function", "math has no function 'no_such_function'"),
    ],
)
def test_what_is_not_there_is_named(file, name, part):
    with pytest.raises(UserError) as error:
        load_function(name.format(folder=file.parent))
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("\n1 / 0", "ZeroDivisionError: division by zero ({file}, line 2)"),
        ("\n\nimport nothing_like_it", "ModuleNotFoundError: No module named 'nothing_like_it' ({file}, line 3)"),
        ("def anything(:\n    pass", "SyntaxError: invalid syntax ({file}, line 1)"),
        ("import sys\nsys.exit('no')", "SystemExit: no ({file}, line 2)"),
        (
            "\nimport json\njson.loads('')",
            "JSONDecodeError: Expecting value: line 1 column 1 (char 0) ({file}, line 3)",
        ),
    ],
)
def test_a_mistake_in_the_file_is_told_by_its_line(source, part, tmp_path, monkeypatch):
    file = tmp_path / "broken_reward.py"
    file.write_text(source, encoding="utf-8")
    with pytest.raises(UserCodeError) as error:
        load_function(f"{file}:anything")
    assert str(error.value) == f"the reward's file broken_reward.py raised {part.format(file=file)}"
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserCodeError) as error:
        load_function("broken_reward:anything")
    assert str(error.value) == f"the reward's module broken_reward raised {part.format(file=file)}"
