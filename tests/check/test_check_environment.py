"""A check plays episodes of the environments: what breaks in them, and what earns as much as a right answer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from check_helpers import found
from typer.testing import CliRunner

from cavesson.algorithms.grpo import GRPORun
from cavesson.check.environment import check_environments, rows_of
from cavesson.check.robustness import attack
from cavesson.check.scoring import of_episodes, tasks_of
from cavesson.cli import app
from cavesson.data.prompts import PromptSet
from cavesson.findings.finding import Finding, Fine, SkippedCheck
from cavesson.models.tiny import tiny_tokenizer
from cavesson.rollout.conversation import Conversation
from cavesson.rollout.loading import Given
from cavesson.rollout.rewards.table import Reward
from cavesson.train.prompts import conversation_of, prompts_of

TEMPLATE = (
    "{% if tools %}s:{{ tools | tojson }};{% endif %}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<|endoftext|>{% else %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
SUMS = [(a, b) for a in (3, 8, 15, 21) for b in (2, 11, 30)]
DATA = {"prompt": [f"What is {a} + {b}?" for a, b in SUMS], "answer": [str(a + b) for a, b in SUMS]}


class Sums:
    """Scores the number that was submitted last."""

    def reset(self, answer: str) -> None:
        self.right, self.submitted = answer, ""

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    def submit(self, number: int) -> str:
        """Submit the sum.

        Args:
            number: the sum
        """
        self.submitted = str(number)
        return "thanks"

    def get_reward(self) -> float | None:
        return float(self.submitted == self.right)


class Unscored(Sums):
    """Does not score an episode without an answer."""

    def get_reward(self) -> float | None:
        return super().get_reward() if self.submitted else None


class PaysCalls(Sums):
    def get_reward(self) -> float:
        return float(self.submitted != "")


class PaysCallsToo(Sums):
    def submit(self, number: int) -> str:
        """Submit the sum.

        Args:
            number: the sum
        """
        self.submitted = self.right if self.submitted == "" and number == 1 else str(number)
        return "thanks"


class Leaks(Sums):
    best = 0.0

    def get_reward(self) -> float:
        self.best = max(self.best, super().get_reward() or 0.0)
        return self.best


class Swallows(Sums):
    def get_reward(self) -> float:
        try:
            return float(int(self.submitted) == int(self.right))
        except ValueError:
            return 1.0


class Talks:
    """Asks three times, and is content with the right answer to the last question."""

    def reset(self, prompt: Any, name: str) -> str:
        self.name, self.asked = name, 0
        return f" I am {name}."

    def user_reply(self) -> str | None:
        self.asked += 1
        return f"{self.name} {self.asked}" if self.asked < 3 else None


def played(
    environment: Any, columns: dict[str, list[Any]] | None = None, tools: Sequence[Any] = ()
) -> tuple[Conversation, PromptSet]:
    settings = GRPORun.model_validate(
        {
            "run": "run",
            "data": {"chat": True, "template": TEMPLATE, "max_prompt_tokens": 2000},
            "sampling": {"max_new_tokens": 12},
            "environment": {"max_turns": 4},
        }
    )
    tokenizer = tiny_tokenizer()
    conversation = conversation_of(settings, tokenizer, Given(environment, tools))
    assert conversation is not None
    return conversation, prompts_of(settings, tokenizer, conversation, columns or DATA)


def attacked(environment: Any, *rewards: Any, tools: Sequence[Any] = ()) -> list[Any]:
    conversation, prompts = played(environment, tools=tools)
    kind = conversation.environments.kinds[None]
    tasks = tasks_of(prompts, rows_of(conversation.environments, kind, prompts))
    score = of_episodes([Reward(one.__name__, one) for one in rewards], conversation, kind)
    return list(attack(tasks, kind.tools, score, reads_text=bool(rewards)))


def last_message(prompts: Any, responses: Any, messages: Any, environments: Any, answer: Any) -> list[float]:
    """What rewards get of an episode is checked on the way."""
    assert [one[-1]["content"] for one in messages] == responses
    assert [one.right for one in environments] == answer
    return [float(one == truth) for one, truth in zip(responses, answer, strict=True)]


class Silent(Sums):
    get_reward = None


def lookup(question: str) -> str:
    """Look something up.

    Args:
        question: what to look for
    """
    return f"nothing is known about {question}"


def right_text(prompts: Any, responses: Any, answer: Any, **columns: Any) -> list[float]:
    return [float(one == truth) for one, truth in zip(responses, answer, strict=True)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("environment", "rewards", "tools"),
    [(Sums, (), ()), (Unscored, (), ()), (Silent, (last_message,), ()), (None, (right_text,), (lookup,))],
)
def test_sound_environments_raise_no_alarm(environment: Any, rewards: Any, tools: Any) -> None:
    results = attacked(environment, *rewards, tools=tools)
    assert found(results) == {}
    seen = {one.rule: one for one in results if isinstance(one, Fine)}
    assert seen["attack-calls"].seen == 0.0
    assert seen["attack-calls"].healthy == "mean score over 12 rows; right answers have 1, wrong ones 0"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("check", "environment", "text"),
    [
        ("attack-calls", PaysCalls, "“submit(number=1)” has the score 1"),
        ("attack-calls", PaysCallsToo, "“submit(number=1)” has the score 1"),
        ("reward-repeats", Leaks, "before and after other answers"),
        ("attack-exception", Swallows, "ValueError: invalid literal for int()"),
        ("attack-empty", Swallows, "“” has the score 1"),
    ],
)
def test_flaws_of_an_environments_reward_are_found(check: str, environment: Any, text: str) -> None:
    results = attacked(environment)
    one = next(one for one in results if isinstance(one, Finding) and one.rule == check)
    assert text in one.cause


def test_reset_and_get_reward_are_tried_with_rows_of_each_environment() -> None:
    columns = {
        "prompt": ["Hi"] * 25 + ["Ho"] * 3,
        "environment": ["talk"] * 25 + ["sums"] * 3,
        "name": ["Ann"] * 28,
        "answer": ["7"] * 28,
    }
    conversation, prompts = played({"talk": Talks, "sums": Sums, "never": Unscored}, columns)
    results = list(check_environments(conversation, prompts))
    said = [(one.rule, one.seen, one.healthy.split()[-5:]) for one in results if isinstance(one, Fine)]
    assert said == [
        ("environment-reset", 20, ["which", "Talks", "has", "begun", "an", "episode"][-5:]),
        ("environment-text", "20 of 20, such as “ I am Ann.”", ["to", "which", "Talks", "adds", "a", "text"][-5:]),
        ("environment-reset", 3, ["which", "Sums", "has", "begun", "an", "episode"][-5:]),
        ("environment-text", "0 of 3", ["to", "which", "Sums", "adds", "a", "text"][-5:]),
        ("environment-reward", "0 to 0", ["of", "Sums", "where", "nothing", "was", "said"][-5:]),
    ]
    assert [one.reason for one in results if isinstance(one, SkippedCheck)] == [
        "no row of the data names the environment never"
    ]


class Breaks(Sums):
    def reset(self, answer: str) -> None:
        super().reset(answer)
        self.letter = answer[1]  # of which some answers have only one


class BreaksLater(Sums):
    def get_reward(self) -> float:
        return float(int(self.submitted) == int(self.right))


def test_an_environment_that_breaks_is_one_line_with_its_row_and_place() -> None:
    (one,) = check_environments(*played(Breaks))
    assert isinstance(one, Finding) and (one.rule, one.severity) == ("environment-reset", "error")
    assert one.cause.startswith("Row 1: reset of the environment Breaks raised IndexError: string index out of range (")
    assert __file__ in one.cause and "\n" not in one.cause
    results = list(check_environments(*played(BreaksLater)))
    assert found(results) == {"environment-reward": "error"}
    assert "ValueError" in results[-1].cause and __file__ in results[-1].cause


@pytest.mark.slow  # it predicts the memory of the run, too
def test_the_command_shows_tools_and_findings_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = Path(__file__).read_text()
    body = source[source.index("class Sums:") : source.index("class Unscored(")]
    (tmp_path / "sums.py").write_text(
        body + source[source.index("class PaysCalls(") : source.index("class PaysCallsToo(")]
    )
    rows = [dict(zip(DATA, row, strict=True)) for row in zip(*DATA.values(), strict=True)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    (tmp_path / "grpo.toml").write_text(
        'run = "run"\nsteps = 2\nbatch_size = 8\nmodel.path = "tiny"\nsampling.max_new_tokens = 12\n'
        '[data]\npath = "rows.jsonl"\nchat = true\ntemplate = "template.jinja"\nmax_prompt_tokens = 2000\n'
        '[environment]\nuse = "sums.py:PaysCalls"\nmax_turns = 4\n'
    )
    before = {*tmp_path.iterdir()}
    done = CliRunner().invoke(app, ["check", "grpo.toml", "--no-short-run"])
    assert done.exit_code == 0, done.output
    assert "PaysCalls.add(a: integer, b: integer)" in done.output and "Add two numbers." in done.output
    assert "Calls without an answer earn as much as a right answer" in " ".join(done.output.split())
    (report,) = json.loads(CliRunner().invoke(app, ["check", "--json", "grpo.toml", "--no-short-run"]).stdout)
    assert [(one["environment"], one["name"]) for one in report["tools"]] == [
        ("PaysCalls", "add"),
        ("PaysCalls", "submit"),
    ]
    assert report["tools"][1]["parameters"]["properties"] == {"number": {"type": "integer", "description": "the sum"}}
    assert {one["rule"] for one in report["findings"]} >= {"attack-calls"}
    assert {one.name for one in {*tmp_path.iterdir()} - before} <= {"__pycache__"}
