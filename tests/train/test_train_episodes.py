"""Runs whose policy talks to an environment: what is learned and recorded, and that a resumed run is the same run."""

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pydantic import ValidationError
from train_helpers import everything

import cavesson
from cavesson.algorithms.grpo import GRPORun
from cavesson.algorithms.ppo import PPORun
from cavesson.algorithms.raft import RAFTRun
from cavesson.algorithms.rloo import RLOORun
from cavesson.errors import StoppedError, UserError
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.plan.devices import device_of
from cavesson.plan.predict import Predictor
from cavesson.plan.recipe import Planned
from cavesson.rollout.rewards.table import Reward
from cavesson.tools.evaluate import evaluate
from cavesson.tools.generate import generate
from cavesson.tools.settings import EvaluateSettings, GenerateSettings
from cavesson.train.prompts import conversation_of, prompts_of
from cavesson.train.run import Training

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% if m.role == 'assistant' %}<|endoftext|>{% else %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
RUNS = {"ppo": PPORun, "grpo": GRPORun, "rloo": RLOORun, "raft": RAFTRun}
SOME: dict[str, Any] = {"raft": {"k": 2}}


class Partner:
    """Answers each text of the policy with its number of letters "e", and is satisfied after two answers."""

    def reset(self, prompt: Any, name: str) -> str:
        self.answered, self.name = 0, name
        return f" I am {name}."

    def user_reply(self) -> str | None:
        self.answered += 1
        return f"{self.name} {self.answered}" if self.answered < 3 else None

    def get_reward(self) -> float | None:
        return None if self.name == "nobody" else float(self.answered)


def length(prompts: list[str], responses: list[str], messages: Any, environments: Any, **columns: Any) -> list[float]:
    """Of the last answer; what rewards get is checked on the way."""
    for one, world, response in zip(messages, environments, responses, strict=True):
        assert one[-1]["content"] == response or one[-1]["role"] == "user"
        assert world.name in one[0]["content"]
    return [float(len(response)) / 9 for response in responses]


def made(algorithm: str, folder: Path, data: str | None = None, **changes: Any) -> Training:
    settings = RUNS[algorithm].model_validate(
        {
            "run": folder,
            "steps": 3,
            "batch_size": 4,
            "samples_per_prompt": 2,
            "data": {"chat": True, "template": TEMPLATE} | ({"path": data} if data else {}),
            "sampling": {"max_new_tokens": 12, "eos_token_ids": [0, *range(2, 60)]},
            "environment": {"max_turns": 9, "max_tokens": 60},
            "checkpoint": {"every": 1},
            **({algorithm: SOME[algorithm]} if algorithm in SOME else {}),
        }
    )
    inputs = {
        "model": tiny_model(),
        "tokenizer": tiny_tokenizer(),
        "prompts": {"prompt": ["Hi", "Ho", "He"], "name": ["Ann", "nobody", "Bob"]},
        "rewards": length,
        "environment": Partner,
    }
    return Training(settings, **{**inputs, **changes})


def quiet(*_: Any) -> None: ...


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) / "run" for name in RUNS}
    for name, folder in folders.items():
        made(name, folder).run(quiet)
    return folders


@pytest.mark.parametrize("algorithm", RUNS)
def test_sampled_tokens_alone_are_learned_and_measured(runs: dict[str, Path], algorithm: str) -> None:
    run = cavesson.open(runs[algorithm])
    tokens = pa.concat_tables(run.tokens(step) for step in range(3)).to_pandas()
    turns = pa.concat_tables(run.turns(step) for step in range(3)).to_pandas()
    assert {"sampled", "template", "user"} == set(tokens["source"])
    is_sampled = tokens["source"] == "sampled"
    assert (tokens["learned"] == is_sampled).all()
    reference = [] if algorithm == "raft" else ["ref_logprob"]  # it has none
    for name in ("logprob", *reference, "sampler_logprob", "entropy", "advantage"):
        assert tokens[name].notna().equals(is_sampled), name
    for step in run.steps().to_pylist():
        if algorithm != "raft":
            assert step["policy/first_ratio_error"] == 0.0
        assert step["episode/turns"] > 1
        assert step["logprob/sampler_gap"] < 1e-4
    rows = run.rows().to_pandas()
    counted = tokens[is_sampled].groupby(["step", "sample"]).size()
    assert rows.set_index(["step", "sample"])["length"].loc[counted.index].equals(counted.astype("int32"))
    # The tokens of a turn of the policy are exactly the sampled ones.
    spoken = turns[turns["role"] == "assistant"].groupby(["step", "sample"])["tokens"].sum()
    assert spoken.loc[counted.index].tolist() == counted.tolist()


def test_an_environment_scores_beside_rewards_or_does_not(runs: dict[str, Path]) -> None:
    for row in cavesson.open(runs["grpo"]).rows().to_pylist():
        parts = dict(row["reward_parts"])
        assert ("I am nobody." in row["prompt"]) == ("Partner" not in parts)
        assert row["reward"] == pytest.approx(sum(parts.values()))
        assert dict(row["reward_weights"]) == dict.fromkeys(parts, 1.0)


def test_turns_are_what_their_tokens_say(runs: dict[str, Path]) -> None:
    run, tokenizer = cavesson.open(runs["grpo"]), tiny_tokenizer()
    tokens = (
        pa.concat_tables(run.tokens(step) for step in range(3))
        .to_pandas()
        .set_index(["step", "sample", "position"])["token_id"]
    )
    for turn in run.turns(1).to_pylist():
        if turn["tokens"]:
            places = range(turn["first_token"], turn["first_token"] + turn["tokens"])
            ids = [int(tokens[turn["step"], turn["sample"], place]) for place in places]
            assert tokenizer.decode(ids, skip_special_tokens=True) == turn["text"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_stopped_run_continues_bit_for_bit(runs: dict[str, Path], tmp_path: Path, algorithm: str) -> None:
    def stop(*_: Any) -> None:
        raise StoppedError("stopped after a step")

    for resume in (False, True, True):
        with pytest.raises(StoppedError):
            made(algorithm, tmp_path / "run", **({"resume": True} if resume else {})).run(stop)
    found, expected = tmp_path / "run", runs[algorithm]
    assert everything(found) == everything(expected)
    columns = {"attempt", "seconds"}
    told = [cavesson.open(one).turns(step).to_pylist() for one in (found, expected) for step in range(3)]
    kept = [[{name: x for name, x in turn.items() if name not in columns} for turn in turns] for turns in told]
    assert kept[:3] == kept[3:] and all(kept)


def test_tools_that_would_leave_out_the_environment_refuse(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Hi\n")
    data = {"path": str(tmp_path / "prompts.txt")}
    with pytest.raises(UserError, match="trained with tools or an environment"):
        next(generate(str(runs["grpo"]), GenerateSettings.model_validate({"data": data})))
    with pytest.raises(UserError, match="trained with tools or an environment"):
        evaluate(str(runs["grpo"] / "model"), EvaluateSettings.model_validate({"data": data}))


def test_an_environment_that_has_changed_is_noticed(tmp_path: Path) -> None:
    class Changed(Partner):
        def get_reward(self) -> float | None:
            return 2.0

    class Again(Partner):
        def get_reward(self) -> float | None:
            return 3.0

    def stop(*_: Any) -> None:
        raise StoppedError("stopped after a step")

    with pytest.raises(StoppedError):
        made("grpo", tmp_path / "run", environment=Changed).run(stop)
    with pytest.raises(UserError, match="environment has another source"):
        made("grpo", tmp_path / "run", environment=Again, resume=True)


class Graded(Partner):
    """Says what each turn earned, and reads the prompt, which a file of plain texts has no column for."""

    def reset(self, prompt: Any) -> str:
        assert prompt[0]["content"] in ("Hi", "Ho")
        return super().reset(prompt, "Ann")

    @property
    def turn_rewards(self) -> list[float | None]:
        return [1.5, None, -2.0][: self.answered + 1][:3]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_rewards_of_turns_are_part_of_the_reward_and_ppo_gives_each_turn_its_own(
    tmp_path: Path, algorithm: str
) -> None:
    (tmp_path / "prompts.txt").write_text("Hi\nHo\n")
    changes = {"environment": Graded, "rewards": None, "prompts": None}
    made(algorithm, tmp_path / "run", data=str(tmp_path / "prompts.txt"), **changes).run(quiet)
    run, several = cavesson.open(tmp_path / "run"), 0
    for step in range(3):
        turns = run.turns(step).to_pandas()
        assert turns[turns["role"] == "user"]["reward"].isna().all()
        for sample, own in turns[turns["role"] == "assistant"].groupby("sample"):
            expected = [1.5, None, -2.0][: len(own)]
            assert [None if math.isnan(one) else one for one in own["reward"]] == expected
            row, tokens = run.rollout(step, int(sample))
            parts = dict(row["reward_parts"])
            assert parts["Graded.turns"] == sum(filter(None, expected))
            assert row["reward"] == parts["Graded"] + parts["Graded.turns"]
            several += len(own) > 2
            if algorithm == "ppo":
                _check_places(tokens.to_pandas(), own, row)
    assert several


def _check_places(tokens: pd.DataFrame, turns: pd.DataFrame, row: dict[str, Any]) -> None:
    """Check that token rewards without their penalty are those of the turns, and the rest at the end."""
    penalty = row["kl_coef"] * (tokens["logprob"] - tokens["ref_logprob"])
    rest = (tokens["token_reward"] + penalty).fillna(0.0)
    expected = pd.Series(0.0, index=rest.index)
    for turn in turns.itertuples():
        if not math.isnan(turn.reward):
            expected[turn.first_token + turn.tokens - 1] = turn.reward
    expected[tokens["token_reward"].last_valid_index()] += row["shaped_reward"] - expected.sum()
    assert rest.tolist() == pytest.approx(expected.tolist(), abs=0.01)  # recorded with eleven bits


def test_the_prompts_of_a_run_are_the_same_for_what_looks_ahead(tmp_path: Path) -> None:
    """With the tools that are offered, which are much of a prompt."""
    template = "{{ tools | map(attribute='function.name') | join(' ') if tools else '' }}" + TEMPLATE.replace(
        "{{ m.content }}",
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>"
        "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}",
    )
    (tmp_path / "prompts.txt").write_text("Hi\nHo\n")
    (tmp_path / "template").write_text(template)
    (tmp_path / "tools.py").write_text(
        'def shout(text: str) -> str:\n    """Shout.\n\n    Args:\n        text: it\n    """\n    return text.upper()\n'
        "def reward(prompts, responses, **columns):\n    return [0.0 for _ in responses]\n"
    )
    settings = GRPORun.model_validate(
        {
            "run": tmp_path / "run",
            "model": {"path": "tiny"},
            "batch_size": 4,
            "samples_per_prompt": 2,
            "data": {"path": str(tmp_path / "prompts.txt"), "chat": True, "template": str(tmp_path / "template")},
            "environment": {"tools": [f"{tmp_path}/tools.py:shout"]},
            "rewards": [{"use": f"{tmp_path}/tools.py:reward"}],
        }
    )
    training = Training(settings)
    prompts = training.collector.prompts
    assert training.trainer.describe()["tools"] == ["shout"]
    assert prompts.texts[0].startswith("shoutu:Hi")
    conversation = conversation_of(settings, tiny_tokenizer())
    assert prompts_of(settings, tiny_tokenizer(), conversation).ids == prompts.ids
    planned = Planned("recipe.toml", "grpo", settings, settings.rewards, False)
    assert Predictor(planned, device_of("h100", 1), 1).data.ids == prompts.ids


def test_what_cannot_be_played_is_said_before_a_model_is_loaded(tmp_path: Path) -> None:
    class Loud(Partner):
        def get_reward(self) -> float | None:
            raise RuntimeError("no score today")

    class Wants(Partner):
        def reset(self, prompt: Any, name: str, level: int) -> str:
            return ""

    def nothing(a):  # type: ignore[no-untyped-def]
        """It has no type hint."""

    small = tiny_model()
    small.config.max_position_embeddings = 300
    cases: dict[str, dict[str, Any]] = {
        r"data.max_prompt_tokens 256 \+ environment.max_tokens 60": {"model": small},
        "a reward and an environment are called 'Partner'": {"rewards": [Reward("Partner", length)]},
        "no score today": {"environment": Loud},
        "level": {"environment": Wants},
        "type hint": {"tools": [nothing]},
        "does not write tools": {"tools": [quieted]},
    }
    for number, (said, changes) in enumerate(cases.items()):
        with pytest.raises(UserError, match=said):
            made("grpo", tmp_path / str(number), **changes)
        assert not (tmp_path / str(number)).exists()
    with pytest.raises(ValidationError, match="max_tokens 5 is less than the 12 tokens"):
        GRPORun.model_validate({"sampling": {"max_new_tokens": 12}, "environment": {"max_tokens": 5}})


def quieted(text: str) -> str:
    """Say it again.

    Args:
        text: it
    """
    return text
