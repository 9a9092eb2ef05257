import inspect

import pytest

from cavesson.config_paths import in_folder
from cavesson.errors import UserCodeError, UserError
from cavesson.rollout import contract
from cavesson.rollout.calling import Caller
from cavesson.rollout.environments import Environments, NoEnvironment
from cavesson.rollout.loading import Given, load_environments
from cavesson.rollout.settings import EnvironmentSettings


def search(query: str) -> str:
    """Search.

    Args:
        query: what to look for
    """
    return query


class Calculator:
    """As in TRL's documentation: `reset`, tools and `get_reward`."""

    def __init__(self):
        self.total = 0

    def reset(self, question: str, start: int = 0, **row):
        self.total, self.row = start, row
        return f"{question}?"

    def multiply(self, a: int, b: int) -> int:
        """Multiply.

        Args:
            a: one factor
            b: the other
        """
        self.total = a * b
        return self.total

    async def add(self, a: int) -> int:
        """Add to the last result.

        Args:
            a: a number
        """
        self.total += a
        return self.total

    def get_reward(self):
        return float(self.total)

    @property
    def broken(self):
        raise AssertionError("a property is not a tool, and is not called")

    @classmethod
    def made(cls):
        return cls()

    def _helper(self):
        return 1


class Game:
    def reset(self, word: str):
        self.word = word

    def user_reply(self) -> str | None:
        return None


class Hears(Game):
    def user_reply(self, answer: str) -> str | None:
        return answer.upper()


class HearsMore(Game):
    def user_reply(self, answer: str, mood: str) -> str | None:
        return answer


def test_a_user_may_hear_what_was_said():
    environments = Environments({None: Hears})
    one = environments.take(environments.of({}))
    assert contract.user_reply(Caller(1, 5.0), one, "hello").result(10) == "HELLO"
    with pytest.raises(UserError, match=r"HearsMore: user_reply .* gets no argument but 'answer'"):
        Environments({None: HearsMore})


class PaidByTurn(Game):
    """Its property needs what `reset` sets."""

    def reset(self, **row):
        self.earned = [1.0]

    @property
    def turn_rewards(self):
        return self.earned


def test_rewards_of_turns_are_noticed_before_the_first_episode():
    assert Environments({None: PaidByTurn}).kinds[None].rewards_turns
    assert not Environments({None: Game}).kinds[None].rewards_turns


def test_the_tools_of_an_environment_are_the_functions_then_its_methods_as_in_trl():
    kind = Environments({None: Calculator}, [search]).kinds[None]
    # What TRL 1.16 does in `GRPOTrainer.__init__`: standalone tools, then `inspect.getmembers` of the class.
    members = [name for name, _ in inspect.getmembers(Calculator, inspect.isfunction)]
    theirs = [name for name in members if name not in ("reset", "get_reward") and not name.startswith("_")]
    assert [*kind.tools] == ["search", *theirs] == ["search", "add", "multiply"]
    assert (kind.label, kind.scores, kind.speaks) == ("Calculator", True, False)


def test_each_instance_has_tools_of_its_own():
    environments = Environments({None: Calculator}, [search])
    kind = environments.of({})
    one, two = environments.take(kind), environments.take(kind)
    assert one.environment is not two.environment
    assert one.tools["multiply"].function(a=2, b=3) == 6
    assert two.tools["multiply"].function(a=2, b=4) == 8
    assert (one.environment.total, two.environment.total) == (6, 8)
    assert one.tools["search"].function is search
    assert one.tools["multiply"].schema == kind.tools["multiply"].schema


def test_instances_are_made_once_and_reused_in_order():
    made = []

    class Counted(NoEnvironment):
        def __init__(self):
            made.append(self)

    environments = Environments({None: Counted})
    kind = environments.of({})
    for _ in range(3):
        taken = [environments.take(kind) for _ in range(4)]
        assert [one.environment for one in taken] == made
        environments.release(taken)
    assert len(made) == 4


def test_reset_gets_the_columns_that_it_names_or_all():
    row = {"prompt": "p", "question": "q", "word": "w"}
    both = Environments({"calculator": Calculator, "game": Game})
    assert both.kinds["calculator"].taken(row | {"environment": "calculator"}) == row  # as in TRL
    assert both.kinds["game"].taken(row | {"environment": "game"}) == {"word": "w"}
    alone = Environments({None: Calculator}).kinds[None]
    assert alone.taken(row | {"environment": "x"}) == row | {"environment": "x"}


def test_a_table_is_routed_by_the_column_environment():
    environments = Environments({"maths": Calculator, "play": Game})
    environments.check({"environment": ["maths", "play"], "question": ["q", ""], "word": ["", "w"]})
    assert environments.of({"environment": "play"}).label == "Game"
    assert environments.take(environments.of({"environment": "maths"})).environment.total == 0


@pytest.mark.parametrize(
    ("factories", "columns", "words"),
    [
        (
            {None: Calculator},
            {"prompt": ["p"], "answer": ["a"]},
            ["Calculator", "'question'", "prompt, answer", __file__],
        ),
        ({"a": Calculator, "b": Game}, {"question": ["q"]}, ["'environment'", "a, b", "question"]),
        ({"a": Calculator}, {"question": ["q", "r"], "environment": ["a", "c"]}, ["'c'", "are a"]),
        ({"a": Calculator}, {"question": ["q"], "environment": [None]}, ["None"]),
        ({"a": Calculator}, {"question": ["q"], "environment": [["a"]]}, ["['a']"]),
        ({"a": Calculator, "b": Game}, {"question": ["q"], "environment": ["b"]}, ["Game", "'word'"]),
    ],
)
def test_data_that_lack_what_an_environment_needs(factories, columns, words):
    with pytest.raises(UserError) as error:
        Environments(factories).check(columns)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), error.value


def test_only_the_environments_that_the_data_name_must_fit_them():
    Environments({"a": Calculator, "b": Game}).check({"question": ["q"], "environment": ["a"]})


class Silent(NoEnvironment):
    pass


class WithoutReset:
    def turn(self) -> int:
        """Turn."""
        return 1


class Undocumented(NoEnvironment):
    def turn(self, by: int) -> int:
        return by


class DoneAsTool(NoEnvironment):
    def done(self) -> bool:
        """End."""
        return True


class Twice(NoEnvironment):
    def search(self) -> str:
        """Search."""
        return ""


class WantsArguments(NoEnvironment):
    def get_reward(self, answer):
        return 1.0


class Breaks(NoEnvironment):
    def __init__(self):
        raise ValueError("no licence")


@pytest.mark.parametrize(
    ("factory", "word"),
    [
        (WithoutReset, "WithoutReset has no method `reset`"),
        (Undocumented, "the tool turn .*no docstring"),
        (DoneAsTool, "the tool done .*reserved"),
        (Twice, "two tools are called 'search'"),
        (WantsArguments, "get_reward .*without arguments"),
        (dict, "dict has no method `reset`"),
        (Breaks, f"Breaks raised ValueError: no licence .{__file__}"),
    ],
)
def test_what_cannot_be_an_environment_is_one_line(factory, word):
    with pytest.raises(UserError, match=word) as error:
        Environments({None: factory}, [search])
    assert "\n" not in str(error.value)


FILE = '''
def search(query: str) -> str:
    """Search.

    Args:
        query: what to look for
    """
    return query


class Counter:
    def reset(self, **row):
        self.count = 0

    def step(self) -> int:
        """Count."""
        self.count += 1
        return self.count
'''


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "counting.py"
    file.write_text(FILE, encoding="utf-8")
    return file


def test_from_a_file_and_from_a_module(file, monkeypatch):
    settings = EnvironmentSettings(use=f"{file}:Counter", tools=(f"{file}:search",), max_turns=3)
    assert [*load_environments(settings).of({}).tools] == ["search", "step"]
    monkeypatch.syspath_prepend(file.parent)
    table = EnvironmentSettings(use={"one": "counting:Counter", "two": f"{file}:Counter"})
    assert [one.label for one in load_environments(table).kinds.values()] == ["Counter", "Counter"]


def test_from_python():
    for given in (Calculator, lambda: Calculator(), Calculator.made):
        assert load_environments(EnvironmentSettings(), Given(given, [search])).of({}).label == "Calculator"
    assert [*load_environments(EnvironmentSettings(), Given(tools=[search])).of({}).tools] == ["search"]
    assert not load_environments(EnvironmentSettings()).of({}).tools


@pytest.mark.parametrize(
    ("settings", "given", "word"),
    [
        ({"max_turns": 3}, Given(), r"environment\.max_turns has no effect without environment\.use"),
        ({"timeout": 3.0}, Given(), r"environment\.timeout has no effect"),
        (
            {"call_format": "hermes", "max_turns": 3},
            Given(Game),
            r"environment\.call_format has no effect without tools",
        ),
        ({"call_format": "hermes"}, Given(Silent), r"environment\.call_format has no effect without tools"),
        ({"max_turns": 3}, Given(Silent), r"environment\.max_turns has no effect on a single turn"),
        ({"max_tokens": 3}, Given(Silent), r"environment\.max_tokens has no effect on a single turn"),
        ({}, Given(Game), r"Game has `user_reply`.*environment\.max_turns"),
        ({}, Given({"a": Calculator, "b": Game}), r"Game has `user_reply`.*environment\.max_turns"),
        ({"use": "os:nothing"}, Given(), "environment 'os:nothing': os has no function 'nothing'"),
        ({"use": "nowhere.py:A"}, Given(), r"environment nowhere\.py: there is no such file"),
        ({"tools": ("nowhere.py:a",)}, Given(), r"tool nowhere\.py: there is no such file"),
        ({"use": "os:getcwd"}, Given(Calculator), "two environments"),
        ({}, Given(Calculator()), "takes a class"),
        ({}, Given({"a": Calculator()}), "takes a class"),
        ({}, Given({}), "takes a class"),
        ({}, Given(tools=search), "takes a list of functions"),
        ({}, Given(tools="search"), "takes a list of functions"),
    ],
)
def test_what_cannot_be_loaded_or_has_no_effect(settings, given, word):
    with pytest.raises(UserError, match=word) as error:
        load_environments(EnvironmentSettings(**settings), given)
    assert "\n" not in str(error.value)


def test_a_file_that_breaks_is_named(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("1 / 0\n", encoding="utf-8")
    with pytest.raises(UserCodeError, match=r"environment's file broken\.py raised ZeroDivisionError.*line 1"):
        load_environments(EnvironmentSettings(use=f"{file}:A"))


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"use": "Calculator"}, "file.py:Class"),
        ({"use": {}}, "file.py:Class"),
        ({"use": 3}, "file.py:Class"),
        ({"use": {"a": "Calculator"}}, "file.py:Class"),
        ({"use": {"a": 3}}, "file.py:Class"),
        ({"tools": ("search",)}, "file.py:function"),
        ({"tools": ("a.py:search", "b.py:search")}, "two tools are called 'search'"),
        ({"max_turns": 0}, "max_turns"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"concurrency": 0}, "concurrency"),
        ({"timeout": 0.0}, "timeout"),
        ({"timeout": float("inf")}, "timeout"),
        ({"call_format": "json"}, "call_format"),
        ({"turns": 3}, "turns"),
    ],
)
def test_settings_that_are_wrong_by_themselves_are_one_line(values, word):
    with pytest.raises(UserError, match=word) as error:
        EnvironmentSettings(**values)
    assert "\n" not in str(error.value)


def test_files_are_found_beside_the_recipe(file):
    table = in_folder({"use": {"one": "counting.py:Counter"}, "tools": ["counting.py:search"]}, file.parent)
    settings = EnvironmentSettings(**table)
    assert settings.use == {"one": f"{file}:Counter"}
    assert settings.tools == (f"{file}:search",)
