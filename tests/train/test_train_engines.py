"""An engine that nobody here knows samples, and everything else asks what it cannot do, never for its name."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from train_helpers import PROMPTS, quiet, uneven

import cavesson
from cavesson.algorithms.grpo import GRPORun
from cavesson.algorithms.importance import CAP
from cavesson.algorithms.ppo import PPORun
from cavesson.config import SettingsError
from cavesson.demo.settings import demo_settings
from cavesson.errors import UserError
from cavesson.plan.predict import _candidates
from cavesson.registry import ENGINES, EngineEntry
from cavesson.rollout.engines.building import EngineParts
from cavesson.rollout.engines.responses import Engine, Responses
from cavesson.rollout.engines.sampler import Sampler
from cavesson.rollout.engines.settings import SamplingSettings
from cavesson.train.memory import less_memory
from cavesson.train.run import Training


class ByHand(Sampler):
    """Samples one response at a time, and rounds its log-probabilities."""

    def sample(self, *given: Any, **more: Any) -> Responses:
        found = super().sample(*given, **more)
        return found._replace(sampler_logprob=(8 * found.sampler_logprob).round() / 8)

    def remarks(self) -> list[str]:
        return ["responses are sampled by hand"]


def by_hand(parts: EngineParts) -> Engine:
    sampling = parts.sampling.model_copy(update={"batch_size": 1})
    return ByHand(parts.policy, parts.tokenizer, sampling, parts.seed)


CANNOT = {
    "sampling.batch_size": 'with engine "by-hand", which has two hands',
    "sampling.servers": 'with engine "by-hand"',
    "sampling.max_staleness": 'with engine "by-hand"',
    "model.gradient_checkpointing": 'with sampling.engine "by-hand"',
    "model.lora.dora": 'with sampling.engine "by-hand", which knows no norms',
}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lines in the table, as another package adds them."""
    module = ModuleType("made_up")
    vars(module).update(by_hand=by_hand)
    monkeypatch.setitem(sys.modules, "made_up", module)
    monkeypatch.setitem(ENGINES, "by-hand", EngineEntry("made_up", "by_hand", CANNOT, local=True))
    monkeypatch.setitem(ENGINES, "far", EngineEntry("made_up", "far"))


def values(folder: Path, engine: str, **changes: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 4, "engine": engine}
    small = {"run": folder, "steps": 2, "batch_size": 6, "samples_per_prompt": 3, "model": {"device": "cpu"}}
    return {**small, "sampling": sampling, "doctor": {"on_finding": "ignore"}, **changes}


def test_a_made_up_engine_samples_and_its_responses_are_weighted(tmp_path: Path) -> None:
    settings = GRPORun.model_validate(values(tmp_path / "run", "by-hand"))
    training = Training(settings, prompts=PROMPTS, rewards=uneven)
    training.run(quiet)
    run = cavesson.open(tmp_path / "run")
    assert run.rows().num_rows == 12
    sampled = run.tokens(0)["sampler_logprob"].to_pylist()
    assert all(8 * value == round(8 * value) for value in sampled)
    assert settings.algorithm.importance == CAP and "importance/weight_mean" in run.steps().column_names
    assert GRPORun.model_validate(values(tmp_path, "transformers")).algorithm.importance == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"gradient_checkpointing": True}}, "gradient_checkpointing has no effect with sampling.engine"),
        (
            {"model": {"lora": {"dora": True}}},
            "dora has no effect with sampling.engine .by-hand., which knows no norms",
        ),
        ({"sampling": {"engine": "by-hand", "batch_size": 2}}, "batch_size has no effect .*, which has two hands"),
        ({"sampling": {"engine": "by-hand", "max_staleness": 1}}, "max_staleness has no effect with engine .by-hand."),
        (
            {"sampling": {"engine": "by-foot"}},
            "unknown engine; choose one of transformers, vllm, by-hand, far",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message):
        PPORun(**values(tmp_path, "by-hand", **changes))
    PPORun(**values(tmp_path, "by-hand", model={"lora": {"rank": 2}}))


def test_advice_and_plan_follow_what_an_engine_can(tmp_path: Path) -> None:
    def planned(engine: str) -> dict[str, Any]:
        found = _candidates(PPORun(**values(tmp_path, engine)), 1)
        return {name: value for name, value in found if name == "sampling.engine"}

    mine, ours = (PPORun(**values(tmp_path, engine)) for engine in ("by-hand", "transformers"))
    assert "sampling.batch_size" in less_memory(ours) and "sampling.batch_size" not in less_memory(mine)
    assert planned("by-hand") == planned("transformers") and planned("far") == planned("vllm") == {}
    assert [SamplingSettings(engine=engine).starts_server for engine in ENGINES] == [False, True, False, True]


def test_the_demo_samples_in_its_own_process(tmp_path: Path) -> None:
    assert demo_settings(tmp_path / "run", ["--sampling.engine", "by-hand"]).sampling.engine == "by-hand"
    with pytest.raises(UserError, match=r"remove --sampling\.engine"):
        demo_settings(tmp_path / "run", ["--sampling.engine", "far"])
