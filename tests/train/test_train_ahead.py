"""Batches that are sampled and rewarded while the policy learns from earlier ones (`sampling.max_staleness`)."""

import copy
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from account_helpers import account
from train_helpers import LORA, PROMPTS, quiet, settings, uneven
from vllm_stand_in import ROUNDING, Answer, StandIn, serving

import cavesson
from cavesson.algorithms.grpo import GRPORun
from cavesson.data.order import InMemory
from cavesson.doctor import diagnose
from cavesson.doctor.data import RunData
from cavesson.doctor.rules import RULES
from cavesson.errors import ServerError, TerminatedError, UserCodeError, UserError
from cavesson.randomness import Purpose, generator
from cavesson.record import Run
from cavesson.repair.fork import fork
from cavesson.repair.plan import Plan
from cavesson.train.batches import BatchesAhead
from cavesson.train.run import Training

BATCH = 6


class Ended(TerminatedError):
    """The process ends here."""


def ahead(
    server: StandIn, run: Path, rewards: Any = uneven, resume: bool = False, given: Any = PROMPTS, **changes: Any
) -> Training:
    values: dict[str, Any] = {
        "sampling__engine": "vllm", "sampling__servers": [server.url], "sampling__vllm__attempts": 1,
        "sampling__max_staleness": 1, "model__path": str(server.folder), "optimizer__learning_rate": 1e-2,
        "optimizer__schedule": "constant", "checkpoint__every": 1, **changes,
    }  # fmt: skip
    return Training(settings(run, **values), prompts=given, rewards=rewards, resume=resume)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def queue(training: Training) -> Any:
    batches = training.trainer.batches  # type: ignore[attr-defined]
    assert isinstance(batches, BatchesAhead)
    return batches.queue


def all_made(training: Training) -> bool:
    return all(one.done() for one in queue(training))


SEEDS = {int(generator(0, Purpose.TOKENS, batch, row).integers(2**63)): batch for batch in range(9) for row in range(6)}


def batch_of(request: Answer) -> int:
    """The batch that a request belongs to; −1 if it compares weights."""
    return SEEDS.get(request["sampling_params"]["seed"], -1)


def test_the_next_batch_is_sampled_and_rewarded_while_the_policy_learns(server: StandIn, tmp_path: Path) -> None:
    rewarded: list[int] = []

    def reward(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
        rewarded.append(len(responses))
        return uneven(prompts, responses)

    training = ahead(server, tmp_path / "run", reward, steps=3)
    begun = len(rewarded)  # rewards are tried out once

    def report(step: int, metrics: dict[str, float]) -> None:
        batches = min(step + 2, 3)
        until(lambda: len(rewarded) - begun == batches)  # of this step and the next one
        assert len(server.sampled) == batches * BATCH

    training.run(report)
    account(tmp_path / "run", PROMPTS, 3)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapters"])
@pytest.mark.parametrize("staleness", [1, 2])
def test_every_token_has_the_version_that_sampled_it(
    server: StandIn, tmp_path: Path, lora: Any, staleness: int
) -> None:
    steps = 4
    # Every response of a later batch stays unfinished until new weights come; so do half of the others.
    server.waits = lambda request, count: (
        0 < batch_of(request) < steps - 1
        and count >= 2
        and Counter(server.paths)["/update_weight_version"] <= batch_of(request)
    )
    changes = {"sampling__random_length": None, "sampling__max_new_tokens": 6, "sampling__max_staleness": staleness}
    training = ahead(server, tmp_path / "run", steps=steps, model__lora=lora, **changes)
    model = training.trainer.model
    versions = [copy.deepcopy(model.state_dict())]

    def report(step: int, metrics: dict[str, float]) -> None:
        versions.append(copy.deepcopy(model.state_dict()))
        last = min(step + staleness, steps - 1)
        until(lambda: sum(batch_of(request) <= last for request in server.sampled) == (last + 1) * BATCH)
        time.sleep(0.3)  # so that these requests have sampled their first tokens

    metrics = training.run(report).metrics
    assert server.most_adapters == (staleness + 1 if lora else 0)
    run, found = cavesson.open(tmp_path / "run"), set()
    account(tmp_path / "run", PROMPTS, steps)
    for step in range(steps):
        ages: list[int] = []
        for row, mine, logprobs, ids in with_versions(run, step):
            assert mine[0] == row["policy_version"] and (np.diff(mine) >= 0).all()
            assert step - staleness <= mine[0] and mine[-1] <= step
            for version in set(mine.tolist()):
                model.load_state_dict(versions[version])
                with torch.no_grad():
                    logits = model(torch.tensor([row["prompt_ids"] + ids])).logits[0, len(row["prompt_ids"]) - 1 : -1]
                expected = logits.log_softmax(-1)[range(len(ids)), ids].numpy()
                np.testing.assert_allclose(logprobs[mine == version], expected[mine == version], atol=ROUNDING)
            ages += (step - mine).tolist()
            found.add(len(set(mine.tolist())))
        assert metrics[step].get("staleness/max", 0.0) == max(ages)
        assert metrics[step].get("staleness/mean", 0.0) == pytest.approx(np.mean(ages))
    assert max(found) == (1 if lora else 2)  # an adapter stays the same in a response
    assert any("staleness/max" in one for one in metrics)


def with_versions(run: Run, step: int) -> Iterator[tuple[dict[str, Any], Any, Any, list[int]]]:
    """Every rollout of a step, with the versions, the sampler's log-probabilities and the ids of its tokens."""
    tokens, first = run.tokens(step), 0
    known = "sampler_version" in tokens.column_names and tokens["sampler_version"].null_count == 0
    for row in run.rows(steps=[step]).to_pylist():
        here = slice(first, first := first + row["length"])
        each = tokens["sampler_version"].to_numpy()[here] if known else np.full(row["length"], row["policy_version"])
        yield row, each, tokens["sampler_logprob"].to_numpy()[here], tokens["token_id"].to_numpy()[here].tolist()


def test_one_reward_at_a_time(server: StandIn, tmp_path: Path) -> None:
    busy = threading.Lock()

    def reward(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
        assert busy.acquire(blocking=False)
        time.sleep(0.1)
        busy.release()
        return uneven(prompts, responses)

    ahead(server, tmp_path / "run", reward, steps=4, sampling__max_staleness=3).run(quiet)
    account(tmp_path / "run", PROMPTS, 4)


@pytest.mark.slow
def test_long_responses_are_kept_as_often_as_they_are_sampled(server: StandIn, tmp_path: Path) -> None:
    sampled: list[int] = []
    server.spoil = lambda answer: sampled.append(len(answer["choices"][0]["token_ids"])) or answer  # type: ignore[func-returns-value]
    ends = Counter[int]()

    def waits(request: Answer, count: int) -> bool:
        """Responses come back in the order of their lengths, the longest after all others."""
        longest = request["sampling_params"]["max_tokens"]
        ends[id(request)] += 1
        return count == longest - 1 and ends[id(request)] < 20 * longest

    server.waits = waits
    ahead(server, tmp_path / "run", steps=4, sampling__max_staleness=2).run(quiet)
    assert Counter(cavesson.open(tmp_path / "run").rows()["length"].to_pylist()) == Counter(sampled)
    assert len(sampled) == 4 * BATCH and len(set(sampled)) > 3


@pytest.mark.slow
def test_finished_batches_survive_and_others_are_sampled_again(
    server: StandIn, untied_folder: Path, tmp_path: Path
) -> None:
    server.waits = lambda request, count: batch_of(request) == 3
    changes = {"steps": 6, "sampling__max_staleness": 3}
    training = ahead(server, tmp_path / "run", **changes)

    def report(step: int, metrics: dict[str, float]) -> None:
        if step == 0:
            until(lambda: [one.done() for one in queue(training)] == [True, True, False])
        if step == 1:
            raise Ended

    with pytest.raises(Ended):
        training.run(report)
    # The run was killed after step 0, as far as its checkpoint knows.
    first = {step: cavesson.open(tmp_path / "run").rows(steps=[step])["response"].to_pylist() for step in (0, 1)}
    with serving(untied_folder) as other:
        ahead(other, tmp_path / "run", resume=True, **changes).run(quiet)
        assert len(other.sampled) == 3 * BATCH  # batches 3, 4 and 5
    run = cavesson.open(tmp_path / "run")
    account(tmp_path / "run", PROMPTS, 6)
    for step, responses in first.items():
        assert run.rows(steps=[step])["response"].to_pylist() == responses
    versions = [run.rows(steps=[step])["policy_version"].to_pylist() for step in range(6)]
    assert versions[2] == [0] * BATCH and all(min(later) >= 1 for later in versions[3:])


@pytest.mark.slow
def test_a_fork_samples_the_batches_of_later_steps_itself(server: StandIn, untied_folder: Path, tmp_path: Path) -> None:
    changes = {"steps": 4, "checkpoint__keep": 9}
    training = ahead(server, tmp_path / "run", **changes)
    training.run(lambda step, metrics: until(lambda: all_made(training)))
    fork(tmp_path / "run", tmp_path / "fork", Plan("filtered-sampling", {}, 2, 4, True, ""), {})
    with serving(untied_folder) as other:
        ahead(other, tmp_path / "fork", resume=True, **changes).run(quiet)
        assert Counter(map(batch_of, other.sampled)) == {2: BATCH, 3: BATCH}
    account(tmp_path / "fork", PROMPTS, 4)


@pytest.mark.slow
def test_a_failing_reward_ends_the_step_that_needs_it(server: StandIn, untied_folder: Path, tmp_path: Path) -> None:
    calls: list[int] = []

    def reward(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
        calls.append(len(responses))
        if len(calls) == 1 + 3:  # after the trial
            raise ZeroDivisionError("once")
        return uneven(prompts, responses)

    with pytest.raises(UserCodeError, match=r"ZeroDivisionError: once.*\n.*the steps before step 2 are recorded"):
        ahead(server, tmp_path / "run", reward, steps=4).run(quiet)
    with serving(untied_folder) as other:
        ahead(other, tmp_path / "run", resume=True, steps=4).run(quiet)
    account(tmp_path / "run", PROMPTS, 4)


def test_an_end_does_not_wait_for_responses(server: StandIn, tmp_path: Path) -> None:
    server.waits = lambda request, count: batch_of(request) > 0
    training = ahead(server, tmp_path / "run", steps=4)
    asked = 0.0

    def report(step: int, metrics: dict[str, float]) -> None:
        nonlocal asked
        until(lambda: len(server.sampled) == 2 * BATCH)
        asked = time.monotonic()
        raise Ended

    with pytest.raises(Ended):
        training.run(report)
    assert time.monotonic() - asked < 60  # a request may take 600 seconds
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]
    assert not (tmp_path / "run" / "sampling").exists()


def test_a_server_that_an_earlier_run_has_left_paused_goes_on(server: StandIn, tmp_path: Path) -> None:
    server.paused = True
    ahead(server, tmp_path / "run", steps=1).run(quiet)


def test_no_server_stays_paused_if_another_one_fails(server: StandIn, untied_folder: Path, tmp_path: Path) -> None:
    with serving(untied_folder) as other:

        def report(step: int, metrics: dict[str, float]) -> None:
            other.broken.add("/collective_rpc")

        with pytest.raises(ServerError, match="answered 400 Bad Request: 'broken, or asleep'"):
            ahead(server, tmp_path / "run", sampling__servers=[server.url, other.url], steps=4).run(report)
        for one in (server, other):
            assert "/pause" in one.paths and not one.paused


def test_an_end_begins_no_other_reward(server: StandIn, tmp_path: Path) -> None:
    calls, free = [0], threading.Event()

    def reward(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
        calls[0] += 1
        if calls[0] == begun + 2:  # of the batch after the first
            free.wait(200)
        return uneven(prompts, responses)

    begun = 9
    training = ahead(server, tmp_path / "run", reward, steps=4, sampling__max_staleness=2)
    begun = calls[0]

    def report(step: int, metrics: dict[str, float]) -> None:
        until(lambda: calls[0] == begun + 2 and len(server.sampled) == 3 * BATCH)
        time.sleep(0.5)  # so that the last batch waits for its reward too
        threading.Timer(0.5, free.set).start()
        raise Ended

    with pytest.raises(Ended):
        training.run(report)
    assert calls[0] == begun + 2


def test_a_reward_that_needs_the_main_thread_is_found_before_the_first_step(server: StandIn, tmp_path: Path) -> None:
    def timed(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return [0.0] * len(responses)

    with pytest.raises(UserError, match="reward timed raised ValueError: signal only works in main thread"):
        ahead(server, tmp_path / "run", timed)
    assert not server.requests and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_doctor_does_not_take_old_weights_for_a_mismatch(server: StandIn, tmp_path: Path) -> None:
    """In a run whose samples are a step old, only those of the first steps say how well the engines agree."""
    changes = {"steps": 8, "optimizer__learning_rate": 3e-2, "batch_size": 12, "sampling__random_length": (4, 6)}
    ahead(server, tmp_path / "run", **changes).run(quiet)
    run = cavesson.open(tmp_path / "run")
    tokens = run.tokens(7)
    gap = np.abs(tokens["logprob"].to_numpy() - tokens["sampler_logprob"].to_numpy())
    assert np.exp(gap).mean() > 1.03  # what the rule would take for a mismatch
    found = {finding.rule.name for finding in diagnose(RunData(run), RULES).findings}
    assert not found & {"sampler-mismatch", "mismatch-growing", "sampler-stale", "mismatch-tail", "retokenised"}


@pytest.fixture
def dynamic(server: StandIn, tmp_path: Path) -> Iterator[Run]:
    values = {
        "run": tmp_path / "run", "steps": 6, "batch_size": BATCH, "samples_per_prompt": 2, "grpo": {"resample": 2},
        "model": {"device": "cpu", "path": str(server.folder)}, "update": {"epochs": 1},
        "sampling": {"random_length": (1, 6), "engine": "vllm", "servers": [server.url], "max_staleness": 2},
    }  # fmt: skip

    def rare(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
        return [float(sum(map(ord, response)) % 2) for response in responses]

    Training(GRPORun.model_validate(values), prompts=PROMPTS, rewards=rare).run(quiet)
    yield cavesson.open(tmp_path / "run")


@pytest.mark.slow
def test_a_step_that_needs_several_batches_takes_those_of_later_steps(dynamic: Run) -> None:
    rows = dynamic.rows(["step", "sample", "group", "policy_version"]).to_pylist()
    sizes = Counter(row["step"] for row in rows)
    assert [row["sample"] for row in rows] == [i for step in range(6) for i in range(sizes[step])]
    assert len(set(sizes.values())) > 1 and set(sizes.values()) <= {BATCH, 2 * BATCH, 3 * BATCH}
    assert [row["group"] for row in rows[::2]] == InMemory(range(len(PROMPTS)), seed=0).take(0, len(rows) // 2)
    assert all(row["step"] - 2 <= row["policy_version"] <= row["step"] for row in rows)


@pytest.mark.slow
def test_every_prompt_is_used_once_however_often_the_run_is_killed(server: StandIn, tmp_path: Path) -> None:
    """By two processes, one, and two again."""
    steps = 12
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    (tmp_path / "slow.py").write_text(
        "import time\ndef slow(prompts, responses, **_):\n    time.sleep(0.3)\n    return [len(r) for r in responses]\n"
    )
    flags: dict[str, Any] = {
        "data.path": "prompts.txt", "steps": steps, "batch_size": BATCH, "model.device": "cpu", "run": "here",
        "model.path": server.folder, "rewards": '[{use = "slow.py:slow"}]', "checkpoint.every": 1,
        "sampling.engine": "vllm", "sampling.servers": f'["{server.url}"]', "sampling.max_staleness": 2,
        "sampling.max_new_tokens": 6,
    }  # fmt: skip
    words = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    checkpoints = tmp_path / "here" / "checkpoints"
    for processes in (2, 1):
        before = set(checkpoints.glob("step-*"))
        command = [sys.executable, "-m", "cavesson", "ppo", *words, "--processes", str(processes)]
        run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        until(lambda run=run, before=before: set(checkpoints.glob("step-*")) - before or run.poll() is not None)
        assert run.poll() is None, run.communicate()
        time.sleep(random.Random(processes).uniform(0, 0.5))
        everything = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
        for process in everything:
            process.kill()
        run.communicate()
        words = ["--resume", "here"]
    command = [sys.executable, "-m", "cavesson", "ppo", *words, "--processes", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    account(tmp_path / "here", PROMPTS, steps)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_an_evaluation_has_the_latest_weights_and_changes_no_batch(
    server: StandIn, tmp_path: Path, staleness: int
) -> None:
    threads: set[int] = set()

    def reward(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
        threads.add(threading.get_ident())
        return uneven(prompts, responses)

    sampled = {}
    # Responses name their adapter, so that none of them depends on when new weights come.
    changes = {"steps": 4, "model__lora": LORA, "sampling__max_staleness": staleness}
    for folder, held_out in (("off", {}), ("on", {"data__validation": 1 / 3, "evaluation__every": 1})):
        prompts = PROMPTS if held_out else PROMPTS[:4]
        training = ahead(server, tmp_path / folder, reward, given=prompts, **changes, **held_out)
        threads.clear()
        training.run(quiet)
        assert len(threads) == 1  # a reward is never called from two threads at a time
        run = cavesson.open(tmp_path / folder)
        rows = run.rows().to_pylist()
        trained = [(row["step"], row["sample"]) for row in rows if row["split"] == "train"]
        sampled[folder] = {key: run.tokens(*key)["token_id"].to_pylist() for key in trained}
    assert sampled["on"] == sampled["off"] and len(sampled["on"]) == 4 * BATCH
    answers = [row for row in rows if row["split"] == "eval"]
    assert [row["policy_version"] for row in answers] == [step for step in range(5) for _ in range(2)]
    for row in answers:
        tokens = run.tokens(row["step"], row["sample"])
        assert abs(tokens["logprob"].to_numpy() - tokens["sampler_logprob"].to_numpy()).max() < ROUNDING
