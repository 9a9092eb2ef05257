"""An algorithm that nobody here knows trains, and everything else asks what it says of itself, never for its name."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from train_helpers import PROMPTS, quiet, uneven

import cavesson
from cavesson.algorithms.base import Loss, RolloutAlgorithm
from cavesson.algorithms.runs import RolloutRun
from cavesson.check.settings import check_settings
from cavesson.check.short_run import short_run
from cavesson.config import SettingsError
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.proposal import proposal
from cavesson.doctor.reading import Curve, Reading
from cavesson.doctor.rule import APPLIES
from cavesson.doctor.rules import RULES
from cavesson.doctor.series import Series
from cavesson.findings.fixes import advice, names_for
from cavesson.models.settings import ValueSettings
from cavesson.ops.groups import centred
from cavesson.processes import Processes
from cavesson.registry import ALGORITHMS, Entry
from cavesson.train.progress import Progress
from cavesson.train.run import Training
from cavesson.traits import Traits
from cavesson.types import Batch, Scores

BY_NAME = {rule.name: rule for rule in RULES}


class Plain(RolloutAlgorithm):
    """A policy gradient whose baseline is the mean of the step; it declares no traits."""

    lam: float = 0.9
    """a setting that PPO has, too"""

    def credit(self, rollouts: Batch, kl_coef: float, processes: Processes) -> Batch:
        advantage = processes.over_all(centred, rollouts["shaped_reward"], torch.zeros_like(rollouts["group_in_step"]))
        return rollouts.with_columns(advantage=advantage[:, None].float() * rollouts["learned"])

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        loss: Tensor = -scores.logprob * batch["advantage"]
        return Loss(loss, {"loss/total": loss, "policy/entropy": scores.entropy})


class Compared(Plain):
    """The same, which says of itself that it has groups, a critic and a penalty, but clips nothing."""

    kl_estimator: str = "k3"

    @property
    def traits(self) -> Traits:
        return Traits(grouped=True, relative=True, critic=True, kl_place="loss", length_normalised=True)


class PlainRun(RolloutRun):
    """Its name in the table, its section of settings and its class have nothing in common."""

    gradient: Plain = Plain()


class ComparedRun(RolloutRun):
    contest: Compared = Compared()
    value: ValueSettings = ValueSettings()


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two lines in the table, as another package adds them."""
    module = ModuleType("made_up")
    vars(module).update(PlainRun=PlainRun, ComparedRun=ComparedRun)
    monkeypatch.setitem(sys.modules, "made_up", module)
    monkeypatch.setitem(ALGORITHMS, "made-up", Entry("made_up", "PlainRun", "A plain policy gradient."))
    monkeypatch.setitem(ALGORITHMS, "rival", Entry("made_up", "ComparedRun", "A comparison."))
    yield


def values(run: Path, **changes: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 4}
    small = {"run": run, "steps": 3, "batch_size": 6, "samples_per_prompt": 3, "model": {"device": "cpu"}}
    return {**small, "sampling": sampling, "doctor": {"on_finding": "ignore"}, **changes}


def trained(kind: type[RolloutRun], run: Path) -> RunData:
    Training(kind.model_validate(values(run)), prompts=PROMPTS, rewards=uneven).run(quiet)
    return RunData(cavesson.open(run))


def excluded(data: RunData) -> set[str]:
    """The rules that the doctor does not apply because of what the algorithm is."""
    reasons = {str(reason) for reason in APPLIES.values()}
    return {one.rule for one in diagnose(data, RULES).skipped if str(one.reason) in reasons}


def asking_for(*traits: str) -> set[str]:
    return {rule.name for rule in RULES if set(traits) & set(rule.traits)}


def test_every_rule_that_the_traits_allow_is_applied_and_no_other(tmp_path: Path) -> None:
    plain, rival = trained(PlainRun, tmp_path / "plain"), trained(ComparedRun, tmp_path / "rival")
    assert {"zero-variance-groups", "value-start", "clip-fraction-high", "penalty-mis-scaled"} < asking_for(*APPLIES)
    assert excluded(plain) == asking_for("grouped", "clipped", "critic", "kl_place", "length_normalised")
    assert excluded(rival) == asking_for("clipped")
    assert plain.traits["relative"] is False and rival.traits["relative"] is True


def test_the_record_says_what_the_algorithm_is_also_to_who_does_not_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = trained(ComparedRun, tmp_path / "run")
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (info["algorithm"], info["section"]) == ("rival", "contest")
    assert info["traits"] == Compared().traits._asdict()
    assert info["kl"] == {"place": "loss", "estimator": "k1"}
    before = excluded(data)
    monkeypatch.delitem(ALGORITHMS, "rival")
    assert excluded(RunData(cavesson.open(tmp_path / "run"))) == before


def test_an_algorithm_without_a_penalty_has_no_coefficient_anywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with Progress(3, 0, [], quiet=False) as progress:
        Training(PlainRun.model_validate(values(run)), prompts=PROMPTS, rewards=uneven).run(progress.report)
    shown = capsys.readouterr().out
    assert "KL 0.0" in shown and "β" not in shown
    record = cavesson.open(run)
    assert "kl/coef" not in record.steps().column_names and "kl/objective" in record.steps().column_names
    assert set(record.rows(["kl_coef"])["kl_coef"].to_pylist()) == {None}
    assert "kl" not in record.info
    with Progress(3, 0, [], quiet=False) as progress:
        settings = ComparedRun.model_validate(values(tmp_path / "rival"))
        Training(settings, prompts=PROMPTS, rewards=uneven).run(progress.report)
    assert "β 0.050" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kl", "message"),
    [({"coef": 0.1}, "kl.coef has no effect: gradient has no KL penalty"),
     ({"target": 6.0, "coef": 0.1}, "kl.target has no effect: gradient has no KL penalty")],
)  # fmt: skip
def test_the_settings_of_a_penalty_are_refused_where_there_is_none(
    kl: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=message):
        PlainRun(**values(tmp_path, kl=kl))
    assert PlainRun(**values(tmp_path, reference={"kind": "none"})).kl_coef is None
    assert PlainRun(**values(tmp_path, kl={"coef": 0})).kl_coef is None
    assert ComparedRun(**values(tmp_path, kl=kl)).kl_coef == 0.1


def test_checks_ask_the_traits(tmp_path: Path) -> None:
    def checked(run: RolloutRun) -> dict[str, str]:
        found = check_settings(run, 10**6, random=True)
        return {one.rule: getattr(one, "severity", "fine") for one in found}

    filtered = {"sampling": {"max_new_tokens": 4, "top_k": 3}}
    plain, rival = PlainRun(**values(tmp_path / "a", **filtered)), ComparedRun(**values(tmp_path / "b", **filtered))
    assert "kl-coefficient" not in checked(plain) and checked(plain)["filtered-sampling"] == "warning"
    assert "kl-coefficient" in checked(rival) and checked(rival)["filtered-sampling"] == "error"


def test_a_short_run_suggests_a_coefficient_and_counts_groups_only_where_they_matter(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    (tmp_path / "rewards.py").write_text(
        "def long(prompts, responses, **columns):\n    return [len(r) for r in responses]\n"
    )
    given = {"data": {"path": str(tmp_path / "prompts.txt")}, "rewards": [{"use": f"{tmp_path}/rewards.py:long"}]}
    plain = short_run(PlainRun(**values(tmp_path / "a", **given)), 6, 2)
    assert plain.suggestion is None and plain.first.equal_groups is None  # type: ignore[union-attr]
    compared = short_run(ComparedRun(**values(tmp_path / "b", **given)), 6, 2)
    assert compared.suggestion is not None and compared.first.equal_groups is not None  # type: ignore[union-attr]


def test_a_fix_names_the_settings_of_the_own_section_and_none_that_has_no_effect(tmp_path: Path) -> None:
    plain, rival = trained(PlainRun, tmp_path / "plain"), trained(ComparedRun, tmp_path / "rival")
    fades, explosion = BY_NAME["reward-fades"], BY_NAME["kl-explosion"]
    assert proposal(rival, fades, Reading(0.0, True)) == {"contest.lam": 1.0}
    assert advice(fades.texts.fix, names_for(rival.info, fades.texts.fix), {}).startswith("contest.lam = 1 ")
    assert proposal(rival, BY_NAME["estimator-misplaced"], Reading(0.0, True)) == {}
    exploded = Reading(20.0, True, curve=Curve(Series(np.zeros(0), np.zeros(0)), high=10.0))
    assert "kl.coef" in proposal(rival, explosion, exploded)
    assert proposal(plain, explosion, exploded).keys() == {"optimizer.learning_rate"}
    said = advice(explosion.texts.fix, names_for(plain.info, explosion.texts.fix), {})
    assert said.startswith("lower optimizer.learning_rate, ") and "kl" not in said.lower()
    assert rival.setting("config.ppo.lam") == 0.9


def test_a_critic_is_built_only_for_an_algorithm_that_has_one(tmp_path: Path) -> None:
    assert ComparedRun(**values(tmp_path)).critic == ValueSettings()
    assert PlainRun(**values(tmp_path)).critic is None
