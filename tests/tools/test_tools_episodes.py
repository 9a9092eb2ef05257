"""Tools play the episodes of a run whose policy was answered, with code that the user names."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cavesson.algorithms.grpo import GRPORun
from cavesson.config import load
from cavesson.data.chat import Chat
from cavesson.data.types import Turn
from cavesson.errors import UserError
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.rollout.loading import load_environments
from cavesson.rollout.settings import EnvironmentSettings
from cavesson.tools.chat import Talk, chat
from cavesson.tools.compare import compare
from cavesson.tools.evaluate import evaluate
from cavesson.tools.generate import generate, load_policy
from cavesson.tools.generate import said as shown
from cavesson.tools.settings import CompareSettings, EvaluateSettings, GenerateSettings, TalkSettings
from cavesson.train.run import Training

CODE = '''
class Partner:
    """Answers each text of the policy, and is satisfied after two answers."""

    def reset(self, prompt, name):
        self.answered, self.name = 0, name
        return f" I am {name}."

    def user_reply(self):
        self.answered += 1
        return f"{self.name} {self.answered}" if self.answered < 3 else None

    def get_reward(self):
        return None if self.name == "nobody" else float(self.answered)


class Bell:
    """Ends the episode when it is rung."""

    def reset(self, **row):
        self.done = False
        return " Ring!"

    def ring(self, times: int) -> str:
        """Ring the bell.

        Args:
            times: how often
        """
        self.done = times > 1
        return "ding " * times

    def get_reward(self):
        return 2.0


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


def names(prompts, responses, environments, messages, **columns):
    assert [world.name for world in environments] == columns["name"]
    for said, response in zip(messages, responses):
        spoken = [one["content"] for one in said if one["role"] == "assistant"]
        assert not spoken or spoken[-1] == response
    return [float(len(response)) for response in responses]
'''
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<|endoftext|>{% else %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
ROWS = [{"prompt": "Hi", "name": "Ann"}, {"prompt": "Ho", "name": "nobody"}, {"prompt": "He", "name": "Bob"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained with `Partner`, named in its recipe."""
    folder = tmp_path_factory.mktemp("episodes")
    (folder / "code.py").write_text(CODE)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = GRPORun.model_validate(
        {
            "run": folder / "run",
            "steps": 1,
            "batch_size": 4,
            "samples_per_prompt": 2,
            "model": {"device": "cpu"},
            "data": {"path": str(folder / "rows.jsonl"), "chat": True, "template": TEMPLATE},
            "sampling": {"max_new_tokens": 12, "eos_token_ids": [0, *range(2, 60)]},
            "environment": {"use": f"{folder}/code.py:Partner", "max_turns": 9, "max_tokens": 60},
        }
    )
    Training(settings, model=tiny_model(), tokenizer=tiny_tokenizer()).run(lambda *_: None)
    return folder


def flags(folder: Path, *more: str, use: str = "Partner") -> list[str]:
    return ["--data.path", str(folder / "rows.jsonl"), "--environment.use", f"{folder}/code.py:{use}", *more]


def generated(folder: Path, *more: str) -> list[dict[str, Any]]:
    settings = load(GenerateSettings, None, flags(folder, "--device", "cpu", *more))
    return list(generate(str(folder / "run"), settings))


def earned(messages: list[dict[str, Any]], finish_reason: str) -> int:
    """What `Partner` gives a conversation: how often it was asked to reply, the last time perhaps without doing so."""
    replies = [one for one in messages if one["role"] == "user"][1:]
    return len(replies) + (finish_reason == "eos")


def test_episodes_are_generated_as_in_training(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = generated(folder, "--samples", "3")
    assert "environment.max_turns 9; environment.max_tokens 60" in capsys.readouterr().err
    assert [row["name"] for row in rows] == [name for name in ("Ann", "nobody", "Bob") for _ in range(3)]
    several = 0
    for row in rows:
        first, *said = row["messages"]
        assert first["role"] == "user" and first["content"].endswith(f" I am {row['name']}.")
        assert f"u:{row['name']} I am" not in row["prompt"] and row["prompt"].endswith(f"I am {row['name']}.;a:")
        replies = [one["content"] for one in said if one["role"] == "user"]
        assert replies == [f"{row['name']} {number + 1}" for number in range(len(replies))]
        assert row["response"] == [one["content"] for one in said if one["role"] == "assistant"][-1]
        several += bool(replies)
        assert [turn["text"] for turn in row["turns"]] == [one["content"] for one in said]
        assert shown(row) == "".join(f"\n[{one['role']}] {one['content']}" for one in said)
    assert several > 3
    assert generated(folder, "--samples", "3", "--batch_size", "2") == rows


def test_rewards_judge_whole_episodes(folder: Path) -> None:
    settings = load(
        EvaluateSettings,
        None,
        flags(folder, "--device", "cpu", "--samples", "4", "--rewards", f"{folder}/code.py:names"),
    )
    found = evaluate(str(folder / "run"), settings)
    assert len(found.responses) == 12
    for one in found.responses:
        assert one["Partner"] == (
            None if one["columns"]["name"] == "nobody" else earned(one["messages"], one["finish_reason"])
        )
        assert one["names"] == len(one["response"])
        assert one["reward"] == one["names"] + (one["Partner"] or 0)
    given = [one["Partner"] for one in found.responses if one["Partner"] is not None]
    assert found.rewards["Partner"].mean == pytest.approx(sum(given) / len(given))


def test_an_environment_alone_scores(folder: Path) -> None:
    more = ("--device", "cpu", "--sampling.max_new_tokens", "1", "--sampling.eos_token_ids", json.dumps([*range(300)]))
    found = evaluate(str(folder / "run"), load(EvaluateSettings, None, flags(folder, *more)))
    assert list(found.rewards) == ["Partner"]
    for one in found.responses:  # the partner's tokens and the template's do not count
        assert one["tokens"] == sum(said["role"] == "assistant" for said in one["messages"]) == 3


def test_models_are_compared_on_the_same_episodes(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run" / "model", tmp_path / "other")
    models = [str(folder / "run"), str(tmp_path / "other")]
    ends = json.dumps([0, *range(2, 60)])
    more = ["--device", "cpu", "--samples", "2", "--sampling.eos_token_ids", ends, "--environment.max_turns", "2"]
    found = compare(models, load(CompareSettings, None, flags(folder, *more)))
    # The same weights, so the same episodes, although only the first knows its run.
    first, other = found.columns
    assert len(first.responses) == 6
    assert [one["messages"] for one in first.responses] == [one["messages"] for one in other.responses]
    assert first.rewards == other.rewards and other.difference is not None and other.difference.mean == 0
    cut = [one["finish_reason"] in ("length", "turns") for one in first.responses]
    assert first.ended == pytest.approx(1 - sum(cut) / 6)
    assert "turns" in {one["finish_reason"] for one in first.responses}


def test_code_that_a_folder_names_is_not_run_unasked(folder: Path, tmp_path: Path) -> None:
    data = ["--data.path", str(folder / "rows.jsonl")]
    asked = f"add --environment.use {folder}/code.py:Partner"
    for settings, command in ((GenerateSettings, generate), (EvaluateSettings, evaluate)):
        with pytest.raises(UserError, match=asked):
            next(iter(command(str(folder / "run"), load(settings, None, data))), None)  # type: ignore[operator]
    with pytest.raises(UserError, match=asked):
        compare([str(folder / "run")], load(CompareSettings, None, data))
    with pytest.raises(UserError, match=asked):
        chat(str(folder / "run"), load(TalkSettings, None, []))
    other = load(GenerateSettings, None, [*data, "--environment.tools", f"{folder}/code.py:add"])
    assert {row["prompt"] for row in generate(str(folder / "run"), other)} == {
        f"add;u:{row['prompt']};a:" for row in ROWS
    }
    raw = load(GenerateSettings, None, ["--prompt", "Hi", "--raw", "true", "--sampling.max_new_tokens", "2"])
    assert [row["prompt"] for row in generate(str(folder / "run"), raw)] == ["Hi"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--environment.max_turns", "1"), None),
        (("--sampling.max_new_tokens", "70"), "max_tokens 60 is less than the 70 tokens"),
    ],
)
def test_flags_override_the_limits_of_the_run(folder: Path, more: tuple[str, ...], said: str | None) -> None:
    if said is None:
        assert all(sum(one["role"] == "assistant" for one in row["messages"]) == 1 for row in generated(folder, *more))
        return
    with pytest.raises(UserError, match=said):
        generated(folder, *more)


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (
            EvaluateSettings,
            ["--text.path", "a.txt", "--environment.tools", "a.py:f"],
            "environment.tools has no effect",
        ),
        (GenerateSettings, ["--prompt", "a", "--raw", "true", "--environment.use", "a.py:F"], "no effect with raw"),
        (TalkSettings, ["--environment.max_tokens", "9"], "environment.max_tokens has no effect in a chat"),
    ],
)
def test_what_has_no_effect_is_refused(kind: Any, given: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load(kind, None, given)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """A model that has learned two conversations by heart: one adds, one rings."""
    tokenizer, model = tiny_tokenizer(), tiny_model()
    tokenizer.chat_template = TEMPLATE
    renderer = Chat(tokenizer)

    def call(name: str, **arguments: Any) -> Turn:
        asked = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return Turn("assistant", "", {"tool_calls": [asked]})

    def tools(**settings: Any) -> list[Any]:
        loaded = load_environments(EnvironmentSettings.model_validate(settings))
        return [tool.schema for tool in loaded.kinds[None].tools.values()]

    rendered = [
        renderer.render(
            [
                Turn("user", "3+4"),
                call("add", a=3, b=4),
                Turn("tool", "7", {"name": "add"}),
                Turn("assistant", "It is 7"),
            ],
            tools(tools=(f"{folder}/code.py:add",)),
        ),
        renderer.render([Turn("user", "Now Ring!"), call("ring", times=2)], tools(use=f"{folder}/code.py:Bell")),
    ]
    ids = [torch.tensor([tokenizer(str(text), add_special_tokens=False)["input_ids"]]) for text in map(str, rendered)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(160):
        loss = sum(model(input_ids=one, labels=one).loss for one in ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss) < 0.1
    place = tmp_path_factory.mktemp("caller")
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def talking(caller: Path, *more: str) -> Talk:
    settings = load(
        TalkSettings, None, ["--sampling.temperature", "0", "--sampling.max_new_tokens", "90", "--device", "cpu", *more]
    )
    return Talk(*load_policy(str(caller), settings), settings)


def test_a_chat_makes_the_calls_of_the_model(caller: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = talking(caller, "--environment.tools", f"{folder}/code.py:add")
    talk.answer("3+4")
    assert 'add({"a": 3, "b": 4}) = 7\n' in capsys.readouterr().out
    assert [one["role"] for one in talk.messages] == ["user", "assistant", "tool", "assistant"]
    assert talk.messages[-1]["content"] == "It is 7"
    stopped = talking(caller, "--environment.tools", f"{folder}/code.py:add", "--environment.max_turns", "1")
    stopped.answer("3+4")
    assert "(stopped: environment.max_turns is 1)" in capsys.readouterr().out
    assert [one["role"] for one in stopped.messages] == ["user", "assistant", "tool"]


def test_an_environment_may_end_a_chat(caller: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = talking(caller, "--environment.use", f"{folder}/code.py:Bell")
    talk.answer("Now")
    out = capsys.readouterr().out
    assert 'ring({"times": 2}) = ding ding' in out
    assert "(the environment ends the episode with a reward of 2; a new conversation begins)" in out
    assert talk.messages == []


def test_a_chat_has_no_data_for_an_environment(caller: Path, folder: Path) -> None:
    with pytest.raises(UserError, match="wants the column 'prompt', and a chat has no data"):
        talking(caller, "--environment.use", f"{folder}/code.py:Partner", "--environment.max_turns", "3")
