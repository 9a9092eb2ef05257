"""The lines that the doctor gives for TRL, verl and OpenRLHF run, and record the columns that they name."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_record_hooks import Letters, experience, verl_batch
from test_record_trl import trained  # noqa: F401  a fixture

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.recording import WAYS
from cavesson.integrations import openrlhf, trl_grouped, trl_ppo, verl

WAY = {way.name: way for way in WAYS}


def tokens_of(name: str) -> set[str]:
    """Return the token columns that the way names."""
    return {one.removeprefix("tokens.") for one in WAY[name].records if one.startswith("tokens.")}


def lacking(name: str, folder: Path) -> set[str]:
    """Return the columns that the way names and the record lacks; short responses repeat nothing."""
    data = RunData(cavesson.open(folder))
    return {column for column in WAY[name].records if not data.recorded(column)} - {"rows.repetition"}


def test_verl(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ModuleType("verl_trainer")
    exec("def compute_data_metrics(batch): return {}\nclass Trainer:\n    def fit(self): pass", vars(module))
    monkeypatch.setitem(sys.modules, "verl_trainer", module)
    module.Trainer.__module__ = "verl_trainer"
    trainer = module.Trainer()
    trainer.tokenizer, trainer.global_steps = Letters(), 1
    given = {"trainer": trainer}
    exec(WAY["verl"].code, given)
    batch = verl_batch()
    for name in ("rollout_log_probs", "values"):
        batch.batch[name] = batch.batch["old_log_probs"]
    vars(module)["compute_data_metrics"](batch)
    assert lacking("verl", tmp_path / "runs" / "mine") == set()
    assert {*verl.COLUMNS.values(), "learned", "source"} == tokens_of("verl")


def test_openrlhf(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = experience().values
    more = dict.fromkeys(("base_action_log_probs", "rollout_log_probs", "advantages", "returns"), values)
    given = {
        "global_step": 3,
        "experiences": [experience(**more)],
        "self": SimpleNamespace(tokenizer=Letters(), args=None),
    }
    exec(WAY["openrlhf"].code, given)
    assert lacking("openrlhf", tmp_path / "runs" / "mine") == set()
    assert {*openrlhf.COLUMNS.values(), "token_id", "learned", "source"} == tokens_of("openrlhf")


@pytest.mark.slow
def test_trl(trained):  # noqa: F811
    """The tokens of PPO, which TRL 1.16 does not have, and of vLLM are in the hooks alone; this run has no tools."""
    run = trained("grpo", "1.16").run
    script = (Path(__file__).parent / "train_trl.py").read_text("utf-8")
    line = WAY["trl"].code.splitlines()[1].partition("  #")[0]
    assert line.replace('"runs/mine"', "run") in script
    conditional = {"rows.split", "tokens.value", "tokens.token_reward", "tokens.return"}
    of_tools = {one for one, text in WAY["trl"].requires.items() if text == "GRPO with tools or an environment"}
    assert of_tools == {"tokens.source"} | {one for one in WAY["trl"].records if one.startswith("turns.")}
    left = lacking("trl", Path(run.folder)) - conditional - of_tools
    assert left == {"tokens.sampler_logprob", "rows.sampler_gap", "rows.value_error"}


def test_the_hooks_of_trl_have_the_columns_that_its_line_names():
    ones = torch.ones(1, 2)
    names = ("completion_ids", "completion_mask", "advantages", "old_per_token_logps", "ref_per_token_logps")
    output = dict.fromkeys((*names, "sampling_per_token_logps"), ones)
    # The loss adds the entropy, and runs with tools the sources of tokens.
    grouped = {*trl_grouped._tokens(output, []), "entropy", "source"} - {"attended"}
    assert tokens_of("trl") == grouped | {*trl_ppo.COLUMNS}
    of_ppo = {one for one, text in WAY["trl"].requires.items() if text == "PPO"}
    assert of_ppo == {f"tokens.{name}" for name in trl_ppo.COLUMNS.keys() - grouped}
