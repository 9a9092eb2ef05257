"""What is recorded of real trainers of TRL, against what they say of themselves and against transformers alone.

TRL 1.16 is what the tests run with. TRL 1.10, the last with PPO, needs a separate environment:
`python benchmarks/run.py` makes one under build/trl, and CAVESSON_TRL_1_10 names the Python of another. It needs
Cavesson's dependencies as well.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import train_trl
from trl import chat_template_utils

from cavesson.data.chat import Chat
from cavesson.data.prompts import given_prompts
from cavesson.data.settings import PromptSettings
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.rules import RULES
from cavesson.importers import import_run
from cavesson.record import Run
from cavesson.record import open as open_run
from cavesson.rollout.conversation import Conversation
from cavesson.rollout.episodes import play
from cavesson.rollout.loading import Given, load_environments
from cavesson.rollout.settings import EnvironmentSettings

sys.path.append(str(Path(__file__).parents[1] / "rollout"))
from rollout_helpers import Script

ROOT = Path(__file__).parents[2]
OLD = Path(os.environ.get("CAVESSON_TRL_1_10", ROOT / "build" / "trl" / "bin" / "python"))
NEEDS_OLD = pytest.mark.skipif(not OLD.exists(), reason=f"TRL 1.10 has no environment: {OLD} is not there")
PYTHONS = {"1.16": Path(sys.executable), "1.10": OLD}
ROUNDING = 2**-17
"""The grid of recorded log-probabilities; each is off by at most half of it."""


class Trained(NamedTuple):
    run: Run
    seen: list[dict[str, Any]]
    logs: list[dict[str, float]]
    out: Path


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    done: dict[tuple[str, str], Trained] = {}

    def train(name: str, version: str) -> Trained:
        if (name, version) not in done:
            folder = tmp_path_factory.mktemp(f"{name}-{version}")
            command = [PYTHONS[version], ROOT / "tests" / "integrations" / "train_trl.py", name, folder / "run"]
            environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
            result = subprocess.run([*command, folder / "out.json"], env=environment, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr[-3000:]
            found = json.loads((folder / "out.json").read_text())
            done[name, version] = Trained(
                open_run(folder / "run"), found["seen"], found["logs"], folder / "run" / "out"
            )
        return done[name, version]

    return train


BOTH = pytest.mark.parametrize("version", ["1.16", pytest.param("1.10", marks=NEEDS_OLD)])
GROUPED = pytest.mark.parametrize("name", ["grpo", "rloo"])


@pytest.mark.slow
@BOTH
@GROUPED
def test_every_token_is_what_the_trainer_had(trained, name, version):
    run, seen, _, _ = trained(name, version)
    assert len(seen) == 3
    assert run.info["dtype"] == "float32" and run.info["eos_token_ids"] == [0]
    for step, batch in enumerate(seen):
        for sample, (ids, mask) in enumerate(zip(batch["ids"], batch["mask"], strict=True)):
            row, tokens = run.rollout(step, sample)
            length = sum(mask)
            assert tokens["token_id"].to_pylist() == ids[:length]
            assert row["length"] == length
            assert row["finish_reason"] == ("eos" if ids[length - 1] == 0 else "length")
            assert tokens["advantage"].to_numpy() == pytest.approx([batch["advantages"][sample]] * length, rel=2**-11)
            for column, key in (("logprob", "logprobs"), ("entropy", "entropies")):
                assert tokens[column].to_numpy() == pytest.approx(batch[key][sample][:length], rel=1e-3, abs=1e-4)
    # The first step's policy is the reference.
    first = run.tokens(0)
    assert first["ref_logprob"].to_numpy() == pytest.approx(first["logprob"].to_numpy(), abs=1e-4)


@pytest.mark.slow
@BOTH
@GROUPED
def test_rewards_and_metrics_are_those_that_trl_logs(trained, name, version):
    run, _, logs, out = trained(name, version)
    steps = [log for log in logs if "loss" in log]
    rows = run.rows(["step", "sample", "group", "prompt", "response", "reward", "reward_parts", "ground_truth"])
    rows = rows.to_pylist(maps_as_pydicts="strict")
    assert [len([row for row in rows if row["step"] == step]) for step in range(3)] == [8, 8, 8]
    metrics = run.steps().to_pylist()
    for step, log in enumerate(steps):
        mine = [row for row in rows if row["step"] == step]
        assert np.mean([row["reward"] for row in mine]) == pytest.approx(log["reward"], rel=1e-5)
        assert metrics[step]["loss"] == log["loss"] and metrics[step]["reward"] == log["reward"]
        # Two prompts, four responses each.
        assert sorted(map([r["group"] for r in mine].count, {r["group"] for r in mine})) == [4, 4]
    for row in rows:
        parts = {"vowels": float(sum(row["response"].count(v) for v in "aeiou")), "short": -float(len(row["response"]))}
        if row["response"].startswith("a"):
            del parts["short"]
        assert row["reward_parts"] == parts
        assert row["reward"] == pytest.approx(parts["vowels"] + 0.5 * parts.get("short", 0.0))
        assert row["ground_truth"] == row["prompt"].upper()
    if name == "rloo":
        return  # RLOO prints completions and writes no files
    # TRL's own files say the same; without weights, which they do not have, and without ids.
    report = import_run(out, out.parent / "imported")
    assert (report.format, report.rollouts, report.rejected) == ("trl", 24, 0)
    theirs = open_run(out.parent / "imported").rows(["step", "prompt", "response", "reward_parts"])
    theirs = [tuple(row.values()) for row in theirs.to_pylist(maps_as_pydicts="strict")]
    mine = [(row["step"] + 1, row["prompt"], row["response"], row["reward_parts"]) for row in rows]
    assert sorted(map(repr, theirs)) == sorted(map(repr, mine))


@pytest.mark.slow
@BOTH
def test_reward_functions_alone_record_texts_ids_and_parts(trained, version):
    run = trained("rewards", version).run
    rows = run.rows(["step", "sample", "response", "reward", "length"]).to_pylist()
    assert [(row["step"], row["sample"]) for row in rows] == [(s, i) for s in range(2) for i in range(4)]
    for row in rows:
        short = 0.0 if row["response"].startswith("a") else -len(row["response"])
        assert row["reward"] == sum(row["response"].count(v) for v in "aeiou") + short
        ids = run.tokens(row["step"], row["sample"])["token_id"].to_pylist()
        assert len(ids) == row["length"] and 0 < len(ids) <= 4
    assert run.steps().num_rows == 2


@pytest.mark.slow
@NEEDS_OLD
def test_ppo_of_trl_1_10(trained):
    run, _, logs, _ = trained("ppo", "1.10")
    steps = [log for log in logs if "objective/kl" in log]
    assert len(steps) == 3 and run.rows(["step"]).num_rows == 12
    assert run.info["eos_token_ids"] == [0] and run.info["dtype"] == "float32"
    for step, log in enumerate(steps):
        rows = run.rows(["sample", "reward", "shaped_reward", "kl_k1", "finish_reason", "kl_coef"], [step]).to_pylist()
        assert np.mean([row["kl_k1"] for row in rows]) == pytest.approx(log["objective/kl"], abs=1e-3)
        assert np.mean([row["shaped_reward"] for row in rows]) == pytest.approx(log["objective/scores"], abs=1e-6)
        tokens = run.tokens(step)
        logprob, ref = tokens["logprob"].to_numpy(), tokens["ref_logprob"].to_numpy()
        assert -logprob.sum() / 4 == pytest.approx(log["objective/entropy"], rel=1e-4)
        # The reward's own share of the token rewards is where TRL 1.10 puts it: one place after the response, or on
        # the last token of one that fills its length.
        lengths = np.array([len(run.tokens(step, i)) for i in range(4)])
        last = np.append(np.diff(tokens["sample"].to_numpy()) != 0, True)
        scores = np.where(lengths == 8, [row["shaped_reward"] for row in rows], 0.0).repeat(lengths)
        expected = -0.05 * (logprob - ref) + np.where(last, scores, 0.0)
        assert tokens["token_reward"].to_numpy() == pytest.approx(expected, rel=1e-2, abs=1e-4)
        for row in rows:
            penalty = 1.0 if row["finish_reason"] == "length" else 0.0
            assert row["reward"] - row["shaped_reward"] == pytest.approx(penalty, abs=1e-6)
            assert row["kl_coef"] == 0.05
        assert np.isfinite(tokens["value"].to_numpy()).all() and np.isfinite(tokens["return"].to_numpy()).all()


TURNS = [
    [("assistant", None, None), ("tool", "multiply", {"a": 6, "b": 7}), ("assistant", None, None)],
    [
        ("assistant", None, None),
        ("tool", "multiply", {"a": 2, "b": 2}),
        ("tool", "lookup", {"word": "six"}),
        ("assistant", None, None),
    ],
    [("assistant", None, None), ("tool", "divide", {"a": 1, "b": 0}), ("assistant", None, None)],
    [("assistant", None, None)],
]
"""Role, name and arguments of the turns of each rollout; TRL puts the results of async tools last."""


@pytest.mark.slow
def test_turns_and_sources_of_a_run_with_tools_and_an_environment(trained):
    run, seen, _, _ = trained("tools", "1.16")
    encode = train_trl.tokenizer("<|im_end|>")
    assert len(seen) == 2
    for step, batch in enumerate(seen):
        for sample, turns in enumerate(TURNS):
            found = run.turns(step, sample).to_pylist()
            read = [json.loads(line["arguments"]) if line["arguments"] else None for line in found]
            assert [(line["role"], line["name"], a) for line, a in zip(found, read, strict=True)] == turns
            # Tokens: those that TRL has, whoever wrote them; what it learns from is what the policy sampled.
            length = sum(batch["completion_mask"][sample])
            tokens, learned = run.tokens(step, sample), batch["tool_mask"][sample][:length]
            assert tokens["token_id"].to_pylist() == batch["completion_ids"][sample][:length]
            assert tokens["learned"].to_pylist() == [bool(value) for value in learned]
            assert tokens["source"].to_pylist() == ["sampled" if value else "tool" for value in learned]
            assert run.rollout(step, sample).row["length"] == sum(learned)
            for line in (one for one in found if one["first_token"] is not None):
                here = tokens.slice(line["first_token"], line["tokens"])
                assert set(here["source"].to_pylist()) == {"tool" if line["role"] == "tool" else "sampled"}
                if "arguments" not in line["text"]:  # of a call, TRL has parsed the text
                    assert line["text"] in encode.decode(here["token_id"].to_pylist())
        times = {(i, line["name"]): line["seconds"] for i in range(4) for line in run.turns(step, i).to_pylist()}
        assert times[0, "multiply"] >= 0.05 and times[1, "multiply"] >= 0.05 and 0 <= times[1, "lookup"] < 0.05
        (failed,) = (line for i in range(4) for line in run.turns(step, i).to_pylist() if line["error"] is not None)
        assert (failed["sample"], failed["name"], failed["error"]) == (2, "divide", "division by zero")
        assert run.rows(["reward"], [step])["reward"].to_pylist() == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.slow
def test_the_same_class_plays_the_same_episodes_here(trained):
    """Unchanged, with the same texts of the policy: the same rewards, and token for token the same episodes."""
    run, seen, _, _ = trained("tools", "1.16")
    encode = train_trl.tokenizer("<|im_end|>")
    encode.chat_template = chat_template_utils.qwen2_5_chat_template
    environments = load_environments(EnvironmentSettings(), Given(train_trl.Calculator, [train_trl.lookup]))
    conversation = Conversation(EnvironmentSettings(), environments, Chat(encode), 400, 4000)
    asked = {"prompt": [[{"role": "user", "content": "6*7?"}]] * 4}
    prompts = given_prompts(asked, PromptSettings(max_prompt_tokens=4000), encode, conversation.offer)
    episodes = conversation.begin(prompts, range(4), range(4))
    script = Script(encode, {row: [first, "Done."] for row, first in enumerate(train_trl.FIRST)})
    columns = play(script, episodes, 0, None, conversation)
    rewards = conversation.rewards([one.world for one in episodes], [one.turns for one in episodes])
    assert rewards == {"Calculator": run.rows(["reward"], [0])["reward"].to_pylist()}
    for row in (0, 3):  # in row 1, TRL puts the result of an async tool last, and an error in row 2 is not JSON
        length = sum(seen[0]["completion_mask"][row])
        assert episodes[row].ids == seen[0]["completion_ids"][row][:length]
        assert columns.learned[row, :length].tolist() == seen[0]["tool_mask"][row][:length]
    said = [[line["text"] for line in run.turns(0, row).to_pylist() if line["role"] == "tool"] for row in (1, 2)]
    ours = [[turn.text for turn in episodes[row].turns if turn.role == "tool"] for row in (1, 2)]
    assert sorted(ours[0]) == sorted(said[0])
    assert said[1] == ["{'error': 'division by zero'}"]
    assert ours[1] == ['{"error": "ZeroDivisionError: division by zero"}']


def episodes_of(run: Run) -> dict[str, str]:
    """Return what the doctor says of the tokens of episodes, by the names of the rules."""
    rules = ("inserted-tokens-learned", "sampled-tokens-masked")
    found = diagnose(RunData(run), RULES).findings
    return {one.rule.name: str(one.reading.seen) for one in found if one.rule.name in rules}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "rules"),
    [
        ("tools", set()),
        ("learns-results", {"inserted-tokens-learned"}),
        ("masks-calls", {"sampled-tokens-masked"}),
        ("loses-messages", {"inserted-tokens-learned"}),
    ],
)
def test_a_wrong_mask_is_found(trained, mask, rules):
    """Sources are those of the run with the right mask, because the engine's own ids say what was sampled."""
    run = trained(mask, "1.16").run
    right = trained("tools", "1.16").run.tokens(0)
    tokens = run.tokens(0)
    assert tokens["token_id"] == right["token_id"]
    sampled = [source == "sampled" for source in tokens["source"].to_pylist()]
    assert sampled == right["learned"].to_pylist()
    if mask == "loses-messages":
        assert {source for source, own in zip(tokens["source"].to_pylist(), sampled, strict=True) if not own} == {None}
    else:
        assert tokens["source"] == right["source"]
    assert episodes_of(run).keys() == rules
    # Turns have their texts, and their places where messages match the tokens.
    for line in run.turns(0, 0).to_pylist():
        assert (line["first_token"] is None) == (mask == "loses-messages")


@pytest.mark.slow
def test_a_function_that_returns_no_mask_is_found(trained):
    run, sizes, _, _ = trained("function", "1.16")
    said, result, answer = sizes
    for sample in range(4):
        tokens = run.tokens(0, sample)
        assert tokens["learned"].to_pylist() == [True] * sum(sizes)
        assert tokens["source"].to_pylist() == ["sampled"] * said + [None] * result + ["sampled"] * answer
    assert episodes_of(run).keys() == {"inserted-tokens-learned"}
