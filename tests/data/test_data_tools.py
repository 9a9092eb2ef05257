"""`data.tools` names functions and environments, whose schemas are those that an episode offers."""

import json
from pathlib import Path

import pytest

from cavesson.algorithms.sft import SFTRun
from cavesson.config import load
from cavesson.data.settings import ChatSettings
from cavesson.errors import UserError
from cavesson.functions import load_function
from cavesson.rollout.environments import Environments
from cavesson.rollout.loading import Given, load_environments
from cavesson.rollout.settings import EnvironmentSettings

CODE = '''
class Shop:
    """An environment."""
    def reset(self, **row): self.sold = []
    def get_reward(self): return 1.0
    def user_reply(self, answer): return None
    def _ledger(self): return self.sold
    def sell(self, name: str, count: int = 1) -> str:
        """Sell something.

        Args:
            name: what to sell
            count: how many
        """
        return name
    @staticmethod
    def ask(name: str) -> int:
        """Ask for a price.

        Args:
            name: what it is
        """
        return 3

class Empty:
    def reset(self): pass

def search(query: str) -> list[str]:
    """Search.

    Args:
        query: what to look for
    """
    return []

def bare(query): return query

def untyped(query):
    """Search.

    Args:
        query: what
    """

def reset() -> None:
    """Begin again."""

LIMIT = 3
'''
BY_HAND = {"type": "function", "function": {"name": "clock", "description": "Tell the time."}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    return tmp_path


def from_recipe(folder: Path, tools: str) -> tuple[dict, ...]:
    (folder / "recipe.toml").write_text(f'data.path = "rows.jsonl"\ndata.tools = {tools}\n')
    return load(SFTRun, folder / "recipe.toml", []).data.tools


def offered(environments: Environments) -> list[dict]:
    (kind,) = environments.kinds.values()
    return [tool.schema for tool in kind.tools.values()]


def test_functions_are_those_of_the_recipe_s_folder(folder: Path) -> None:
    name = f"{folder}/tools.py:search"
    (schema,) = offered(load_environments(EnvironmentSettings(tools=(name,), max_turns=2)))
    assert from_recipe(folder, '["tools.py:search"]') == (schema,)
    assert from_recipe(folder, '"tools.py:search"') == (schema,)
    assert from_recipe(folder, """'["tools.py:search"]'""") == (schema,)
    assert from_recipe(folder, f"['tools.py:search', {json.dumps(json.dumps(BY_HAND))}]") == (schema, BY_HAND)
    # They are settings like any other: what is recorded needs neither the file nor its folder.
    assert ChatSettings.model_validate_json(ChatSettings(tools=[name]).model_dump_json()).tools == (schema,)


def test_a_flag_names_functions_of_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for text in ("tools.py:search", '["tools.py:search"]'):
        (schema,) = load(SFTRun, None, ["--data.path", "rows.jsonl", "--data.tools", text]).data.tools
        assert schema["function"]["name"] == "search"


def test_an_environment_stands_for_its_tools_in_the_order_of_its_episodes(folder: Path) -> None:
    shop = load_function(f"{folder}/tools.py:Shop")
    schemas = offered(load_environments(EnvironmentSettings(max_turns=2), Given(shop)))
    assert [one["function"]["name"] for one in schemas] == ["ask", "sell"]
    assert list(from_recipe(folder, '["tools.py:Shop"]')) == schemas
    assert schemas[1]["function"]["parameters"]["required"] == ["name"]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ('["missing.py:search"]', "missing.py: there is no such file"),
        ('["tools.py:find"]', "has no function 'find'"),
        ('["tools.py:LIMIT"]', "has no function 'LIMIT'"),
        ('["no_such_module_here:find"]', "no_such_module_here"),
        ('["broken.py:find"]', "nothing_of_this_name"),
        ('["tools.py:bare"]', "it has no docstring"),
        ('["tools.py:untyped"]', "its argument 'query' has no type hint"),
        ('["tools.py:reset"]', "the name is reserved"),
        ('["tools.py:Empty"]', "no public methods"),
        ('["tools.py:search", "tools.py:search"]', "two tools are called 'search'"),
        ('["search"]', 'write a list of functions such as ["tools.py:search"]'),
        ("[3]", "write a list of functions"),
        ("'[{\"type\": '", "write a list of functions"),
    ],
)
def test_what_cannot_be_a_tool_is_said_in_a_plain_line(folder: Path, tools: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        from_recipe(folder, tools)
    said = str(caught.value)
    assert message in said and "data.tools" in said and "recipe.toml" in said
    assert said.count("\n") == 0 or "broken" in tools, said
