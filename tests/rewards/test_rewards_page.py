"""Every example of docs/rewards.md and docs/rewards-http.md works as it stands there."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
import uvicorn
from reward_helpers import call_reward
from test_rewards_http import listening

from cavesson.errors import UserError
from cavesson.rollout.rewards.code import CodeSettings
from cavesson.rollout.rewards.http import HttpSettings
from cavesson.rollout.rewards.settings import RewardSettings
from cavesson.rollout.rewards.table import build_rewards, rehearse, score

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "\n".join((DOCS / name).read_text() for name in ("rewards.md", "rewards-http.md"))
CPU = torch.device("cpu")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def settings(block: str) -> list[RewardSettings]:
    return [RewardSettings.model_validate(one) for one in tomllib.loads(block)["rewards"]]


def test_the_functions_and_their_recipe(tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text(blocks("python")[0])
    monkeypatch.chdir(tmp_path)
    rewards = build_rewards(settings(blocks("toml")[0]), CPU)
    rehearse(rewards, ["2 + 2 ="], {"answer": ["4"], "other": [None]})
    scored = score(rewards, ["2 + 2 =", "3 + 4 ="], ["4 please", "8 please, sir!!"], {"answer": ["4", "7"]})
    assert scored.parts == {"polite": [0.5, 0.0], "maths/right": [1.0, 0.0], "maths/length": [-0.008, -0.015]}
    assert scored.total == pytest.approx([0.5 * 0.5 + 1 - 0.008, -0.015])


def test_the_error_is_the_one_on_the_page(tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text(blocks("python")[0].replace("responses, answer)", "responses, **columns)"))
    source = (
        (tmp_path / "my_reward.py").read_text().replace("zip(answer, responses)", 'zip(columns["answer"], responses)')
    )
    (tmp_path / "my_reward.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    rewards = build_rewards([RewardSettings(use="my_reward.py:correct")], CPU)
    with pytest.raises(UserError) as error:
        rehearse(rewards, ["2 + 2 ="], {})
    said = re.sub(r"line \d+", "line 9", str(error.value).replace(f"{tmp_path}/", ""))
    assert f"cavesson: {said}" in blocks("text")[0]


def test_the_adapter_for_another_trainer_s_function():
    def their_reward(queries, prompts, labels):
        return [float(len(one)) for one in queries]

    space = {"their_reward": their_reward}
    exec(next(block for block in blocks("python") if "def adapted" in block), space)
    assert call_reward(space["adapted"], "adapted", ["p"], ["abc"], {"answer": [1]}) == {"adapted": [3.0]}


@pytest.mark.parametrize("block", blocks("toml"))
def test_the_recipes_are_valid(block):
    for one in settings(block):
        if one.use == "http":
            HttpSettings.model_validate(one.options)


def test_the_server_answers_the_request_on_the_page():
    space: dict = {}
    exec(blocks("python")[-1], space)
    with listening(uvicorn.Config(space["app"], log_level="error")) as url:
        options = {"url": f"{url}/score"}
        (reward,) = build_rewards([RewardSettings(use="http", options=options)], CPU)
        _, asked, answer, _ = (json.loads(block) for block in blocks("json"))
        assert list(reward.function(asked["prompts"], asked["responses"], **asked["columns"])) == answer["rewards"]


def test_the_tests_of_the_code_reward():
    row = json.loads(blocks("json")[0])
    (recipe,) = (block for block in blocks("toml") if 'use = "code"' in block)
    (reward,) = build_rewards(settings(recipe), CPU)
    responses = ["```python\ndef add(a, b):\n    return a + b\n```", "def add(a, b): return 0"]
    assert reward.function([row["prompt"]] * 2, responses, tests=[row["tests"]] * 2) == [1.0, 0.5]


@pytest.mark.parametrize(("title", "options"), [("Rewards over HTTP", HttpSettings), ("Code with tests", CodeSettings)])
def test_every_option_is_on_the_page(title, options):
    section = re.split(r"^## ", PAGE.partition(f"# {title}\n")[2], flags=re.MULTILINE)[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S*?)\s*\|", section, re.MULTILINE))
    assert list(rows) == list(options.model_fields)
    for name, default in rows.items():
        field = options.model_fields[name]
        if default and default != "required":
            assert float(default) == field.default
        assert field.is_required() == (default == "required")
