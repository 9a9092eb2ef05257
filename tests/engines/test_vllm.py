"""The contract of an engine, kept by a real vLLM server: `make test-engines` installs it and runs these tests.

`make test-engines-quick` runs those that are not slow, as CI does.

One server serves most of them; it holds a model that is large enough for vLLM and small enough for two cores.
"""

import copy
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from account_helpers import account
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM

import cavesson
from cavesson.algorithms.grpo import GRPORun
from cavesson.algorithms.ppo import PPORun
from cavesson.data.prompts import padded_prompts
from cavesson.errors import ServerError
from cavesson.models.load import prepare
from cavesson.models.parts import untied
from cavesson.models.policy import Policy
from cavesson.models.tiny import tiny_tokenizer
from cavesson.processes import Processes
from cavesson.record import Run
from cavesson.rollout.engines.distribution import sampling_logprobs
from cavesson.rollout.engines.responses import StopTexts
from cavesson.rollout.engines.settings import SamplingSettings, VllmSettings
from cavesson.rollout.engines.vllm import VllmSampler
from cavesson.rollout.engines.vllm_client import VllmClient
from cavesson.rollout.engines.vllm_server import VllmServer, saved_model
from cavesson.train.checkpoint import latest
from cavesson.train.run import Training
from cavesson.types import Batch

PYTHON = os.environ.get("CAVESSON_TEST_VLLM", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs vLLM in a separate environment: make test-engines"),
    pytest.mark.timeout(900),
]
ROUNDING = 1e-4
"""Nats by which two float32 implementations of this model differ."""
ADAPTERS = {"rank": 4, "alpha": 16}
SLOW = pytest.mark.slow
LENGTH = 64
STEPS = 20


def model() -> LlamaForCausalLM:
    """A Llama whose choices depend on what it reads, with heads of 32 dimensions, which vLLM needs."""
    config = LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, bos_token_id=None, eos_token_id=0,
        pad_token_id=1, tie_word_embeddings=True, initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module", autouse=True)
def little_memory() -> Iterator[None]:
    """By default, a server on a CPU takes most of the memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[VllmServer]:
    """A server that was started for nobody in particular, for adapters and for new weights."""
    place = saved_model(model(), tiny_tokenizer(), is_trained=True)
    settings = VllmSettings(python=PYTHON, arguments=("--enforce-eager",))
    server = VllmServer(place, settings, "float32", LENGTH, 8, adapters=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", server.key)  # which those who sample from a running server set
        yield server
    server.close()


def lowercase(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
    return [sum(c.islower() for c in text) / max(1, len(text)) for text in responses]


PROMPTS = ("On the table", "My", "The morning train was", "A dog and")


def sampler(server: VllmServer, folder: Path, **changes: Any) -> VllmSampler:
    """An engine whose server has its weights."""
    policy, settings = Policy(prepare(model())), SamplingSettings(engine="vllm", servers=(server.url,), **changes)
    processes = Processes("cpu")
    engine = VllmSampler(policy, tiny_tokenizer(), settings, 0, processes, None, LENGTH, folder)
    engine.update_weights(0)
    return engine


def prompts(count: int) -> Batch:
    return padded_prompts(tiny_tokenizer()(["My dog"] * count)["input_ids"])


@pytest.mark.parametrize(
    "sampling",
    [
        *(pytest.param(one, marks=SLOW) for one in ({}, {"temperature": 0.6}, {"top_k": 7}, {"top_p": 0.6})),
        {"min_new_tokens": 1, "top_p": 0.9, "temperature": 1.3},
    ],
    ids=str,
)
def test_tokens_have_the_distribution_of_the_settings(
    server: VllmServer, tmp_path: Path, sampling: dict[str, Any]
) -> None:
    draws, engine = 2000, sampler(server, tmp_path, max_new_tokens=1, **sampling)
    responses = engine.sample(prompts(draws), 0, range(draws))
    ids = prompts(1)["prompt_ids"]
    with torch.no_grad():
        logits = engine.policy.model(ids).logits[:, -1].float()
    if sampling.get("min_new_tokens"):
        logits[:, engine.eos] = -torch.inf
    logprob = sampling_logprobs(logits, engine.settings)[0]
    drawn = responses.response_ids[:, 0]
    seen = torch.bincount(drawn, minlength=258).double()
    assert float(seen[logprob.isneginf()].sum()) == 0
    np.testing.assert_allclose(responses.sampler_logprob[:, 0], logprob[drawn], atol=ROUNDING)
    # Cells of a chi-square test hold at least five expected draws; the rest is one cell.
    expected = logprob.double().exp() * draws
    large = expected >= 5
    cells = [*zip(seen[large], expected[large], strict=True), (seen[~large].sum(), expected[~large].sum())]
    observed, wanted = (np.array([float(value) for value in column]) for column in zip(*cells, strict=True))
    kept = wanted > 0
    assert kept.sum() >= 5
    assert chisquare(observed[kept], wanted[kept] * observed[kept].sum() / wanted[kept].sum()).pvalue > 1e-4


@pytest.mark.slow
def test_responses_end_where_they_end_without_a_server(server: VllmServer, tmp_path: Path) -> None:
    stop, rows = ("e", "<|pad|>", "th"), 300
    engine = sampler(server, tmp_path, max_new_tokens=30, stop=stop, random_length=None)
    responses = engine.sample(prompts(rows), 0, range(rows))
    free = sampler(server, tmp_path, max_new_tokens=30)
    uncut = free.sample(prompts(rows), 0, range(rows))
    texts, ends = StopTexts(tiny_tokenizer(), stop), set()
    for row in range(rows):
        ids = uncut.response_ids[row][uncut.mask[row] > 0].tolist()
        reason, kept = uncut.finish_reasons[row], ids
        for count in range(1, len(ids) + 1):
            cut = texts.cut(ids[:count])
            if cut is not None and not (reason == "eos" and count == len(ids)):
                reason, kept = "stop", ids[:cut]
                break
        mine = responses.response_ids[row][responses.mask[row] > 0].tolist()
        assert (mine, responses.finish_reasons[row]) == (kept, reason)
        ends.add(reason)
    assert ends == {"eos", "stop", "length"} or ends == {"stop", "length"}


def reset(server: VllmServer, tmp_path: Path) -> None:
    """Give the server the weights back that it was started with."""
    ours = model()
    with untied(ours):
        ours.save_pretrained(tmp_path / "start")
    VllmClient([server.url], VllmSettings()).load_weights(tmp_path / "start", "start", while_sampling=False)


def learned(server: VllmServer, folder: Path, tmp_path: Path, kind: Any, lora: Any, staleness: int) -> Run:
    """The record of a policy that learns from earlier steps, as its rewards and importance weights show."""
    reset(server, tmp_path)
    values: dict[str, Any] = {
        "run": tmp_path / "run", "steps": STEPS, "batch_size": 48, "samples_per_prompt": 4, "kl": {"coef": 0.0},
        "model": {"path": str(folder), "device": "cpu", "lora": lora},
        "sampling": {"max_new_tokens": 12, "engine": "vllm", "servers": [server.url], "max_staleness": staleness},
        "optimizer": {"learning_rate": 2e-2 if lora else 5e-3, "schedule": "constant"}, "checkpoint": {"every": 0},
    }  # fmt: skip
    training = Training(kind.model_validate(values), prompts=PROMPTS, rewards=lowercase)
    result = training.run(lambda step, metrics: None)
    rewards = [metrics["reward/mean"] for metrics in result.metrics]
    # The reward of a step, a share of about 576 characters, has a standard error below √(0.25 / 576) ≈ 0.02.
    assert np.mean(rewards[-4:]) > np.mean(rewards[:2]) + 0.15, rewards
    weights = [metrics["importance/weight_mean"] for metrics in result.metrics]
    assert weights[0] == pytest.approx(1, abs=ROUNDING) and max(weights) < 1.3
    return cavesson.open(tmp_path / "run")


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        (GRPORun, ADAPTERS),
        pytest.param(PPORun, None, marks=SLOW),
        pytest.param(PPORun, ADAPTERS, marks=SLOW),
        pytest.param(GRPORun, None, marks=SLOW),
    ],
)
def test_a_policy_learns(server: VllmServer, folder: Path, tmp_path: Path, kind: Any, lora: Any) -> None:
    record = learned(server, folder, tmp_path, kind, lora, 0)
    for step in range(STEPS):
        tokens = record.tokens(step)
        np.testing.assert_allclose(tokens["logprob"].to_numpy(), tokens["sampler_logprob"].to_numpy(), atol=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, ADAPTERS], ids=["all weights", "adapters"])
@pytest.mark.parametrize("kind", [PPORun, GRPORun])
def test_a_policy_learns_from_samples_of_the_step_before(
    server: VllmServer, folder: Path, tmp_path: Path, kind: Any, lora: Any
) -> None:
    record = learned(server, folder, tmp_path, kind, lora, 1)
    rows = record.rows(["step", "policy_version"]).to_pylist()
    assert all(row["step"] - 1 <= row["policy_version"] <= row["step"] for row in rows)
    stale = [row for row in rows if row["policy_version"] < row["step"]]
    assert len(stale) > len(rows) / 2
    fresh = record.tokens(0)
    np.testing.assert_allclose(fresh["logprob"].to_numpy(), fresh["sampler_logprob"].to_numpy(), atol=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "staleness"), [(None, 0), (ADAPTERS, 1)], ids=["all weights", "adapters, ahead"])
def test_held_out_prompts_are_answered_by_the_weights_of_the_step(
    server: VllmServer, folder: Path, tmp_path: Path, lora: Any, staleness: int
) -> None:
    trained = {}
    for name, prompts, held_out in (("off", PROMPTS[:2], 0.0), ("on", PROMPTS, 0.5)):
        reset(server, tmp_path)
        values: dict[str, Any] = {
            "run": tmp_path / name, "steps": 5, "batch_size": 8, "data": {"validation": held_out},
            "model": {"path": str(folder), "device": "cpu", "lora": lora}, "checkpoint": {"every": 0},
            "sampling": {"max_new_tokens": 8, "engine": "vllm", "servers": [server.url], "max_staleness": staleness},
            "optimizer": {"learning_rate": 1e-2, "schedule": "constant"}, "evaluation": {"every": 2 * bool(held_out)},
        }  # fmt: skip
        Training(PPORun.model_validate(values), prompts=prompts, rewards=lowercase).run(lambda step, metrics: None)
        run = cavesson.open(tmp_path / name)
        rows = run.rows().to_pylist()
        trained[name] = [run.tokens(row["step"], row["sample"]) for row in rows if row["split"] == "train"]
    answers = [row for row in rows if row["split"] == "eval"]
    assert [row["step"] for row in answers] == [0, 0, 2, 2, 4, 4, 5, 5]
    assert all(row["policy_version"] == row["step"] for row in answers)
    for row in answers:
        tokens = run.tokens(row["step"], row["sample"])
        np.testing.assert_allclose(tokens["logprob"].to_numpy(), tokens["sampler_logprob"].to_numpy(), atol=ROUNDING)
    assert any(row["response"] != row["ref_response"] for row in answers)
    # An evaluation between steps leaves the batches of a step alone; beside those of later steps, only about.
    same = [on["token_id"].equals(off["token_id"]) for on, off in zip(trained["on"], trained["off"], strict=True)]
    assert all(same) if staleness == 0 else np.mean(same) > 0.9


@pytest.mark.slow
def test_the_weights_change_within_a_response(server: VllmServer, tmp_path: Path) -> None:
    """Every token has the log-probability of the weights that its version names."""
    reset(server, tmp_path)
    rows, length = 64, 40
    engine = sampler(server, tmp_path, max_new_tokens=length, eos_token_ids=(257,), max_staleness=1)
    found = set()
    for step in range(12):  # until the weights come neither before nor after all tokens
        before = Policy(copy.deepcopy(engine.policy.model))
        with ThreadPoolExecutor(1) as pool:
            sampling = pool.submit(engine.sample, prompts(rows), step, range(rows))
            time.sleep(0.1 + step % 6 / 5)
            with torch.no_grad():
                for parameter in engine.policy.parameters():
                    parameter.add_(torch.randn(parameter.shape) * 0.05)
            engine.update_weights(step + 1)
            responses = sampling.result()
        versions, mask = responses.versions, responses.mask > 0
        assert (versions[:, 1:] >= versions[:, :-1])[mask[:, 1:]].all()
        found = set(versions[mask].tolist())
        assert found <= {step, step + 1}
        batch = prompts(rows).with_columns(
            response_ids=responses.response_ids, attended=responses.mask, learned=responses.mask
        )
        with torch.no_grad():
            scored = torch.stack([policy(batch).logprob for policy in (before, engine.policy)])
        expected = scored.gather(0, (versions[None] - step).clamp_min(0))[0]  # padding has no version
        np.testing.assert_allclose(responses.sampler_logprob[mask], expected[mask], atol=ROUNDING)
        if len(found) == 2:
            break
    assert len(found) == 2


def arguments(tmp_path: Path, folder: Path, **changes: object) -> list[str]:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    flags: dict[str, object] = {
        "data.path": "prompts.txt", "steps": 30, "batch_size": 8, "model.device": "cpu", "model.path": folder,
        "rewards": '[{use = "lowercase"}]', "run": "here", "sampling.engine": "vllm", "sampling.vllm.python": PYTHON,
        "sampling.vllm.arguments": '["--enforce-eager"]', "checkpoint.every": 1, "model.lora.rank": 4, **changes,
    }  # fmt: skip
    return ["ppo", *(text for name, value in flags.items() for text in (f"--{name}", str(value)))]


def servers() -> list[psutil.Process]:
    """The servers that runs have started and that still run; that of the tests is a child of this process."""
    found = []
    for process in psutil.process_iter(["cmdline", "ppid", "status"]):
        info = process.info
        is_server = any("cavesson-vllm-" in word for word in info["cmdline"] or [])
        if is_server and info["ppid"] != os.getpid() and info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def started_by(servers: list[psutil.Process]) -> list[int]:
    """The processes that servers have started: those of their sessions, even after the servers' own end."""
    sessions = {one.pid for one in servers}
    return [pid for pid in psutil.pids() if pid not in sessions and session_of(pid) in sessions]


def session_of(pid: int) -> int | None:
    try:
        return None if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE else os.getsid(pid)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None


def begun(command: list[str], tmp_path: Path) -> subprocess.Popen[str]:
    """A run that has recorded a step."""
    process = subprocess.Popen(command, cwd=tmp_path, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while not list((tmp_path / "here" / "checkpoints").glob("step-*")):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.05)
    return process


@pytest.mark.slow
def test_a_run_starts_its_own_server_and_survives_its_death(folder: Path, tmp_path: Path) -> None:
    """Two processes of one run share the server; it is killed, the run says so and how to continue, and continues."""
    command = [sys.executable, "-m", "cavesson"]
    left = set(Path("/tmp").glob("cavesson-vllm-*"))  # by runs that were killed
    process = begun([*command, *arguments(tmp_path, folder, processes=2)], tmp_path)
    killed = servers()
    assert killed
    assert started_by(killed)  # its engine
    for one in killed:
        one.kill()
    _, errors = process.communicate(timeout=120)
    line = errors.strip().splitlines()[-1]
    assert process.returncode == 2 and "Traceback" not in errors, errors[-3000:]
    assert "continue with: " in errors and "vLLM server" in errors, errors[-3000:]
    assert not servers() and set(Path("/tmp").glob("cavesson-vllm-*")) <= left
    assert not started_by(killed)
    done = latest(tmp_path / "here")
    assert done is not None
    way = line.split("continue with: ")[1]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = [*shlex.split(way), "--steps", str(done.step + 1)]
    resumed = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    account(tmp_path / "here", PROMPTS, done.step + 1)
    assert not servers()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["adapters", "all weights"])
def test_sharded_processes_sample_ahead_from_their_own_server(folder: Path, tmp_path: Path, lora: bool) -> None:
    changes: dict[str, object] = {"parallel.shard": "full", "sampling.max_staleness": 1, "steps": 4, "processes": 2}
    words = arguments(tmp_path, folder, **changes)
    if not lora:
        at = words.index("--model.lora.rank")
        del words[at : at + 2]
    done = subprocess.run(
        [sys.executable, "-m", "cavesson", *words], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    account(tmp_path / "here", PROMPTS, 4)
    first = cavesson.open(tmp_path / "here").tokens(0)
    np.testing.assert_allclose(first["logprob"].to_numpy(), first["sampler_logprob"].to_numpy(), atol=ROUNDING)
    assert not servers()


@pytest.mark.slow
def test_a_server_ends_with_its_run_however_that_ends(folder: Path, tmp_path: Path) -> None:
    others = set(Path("/tmp").glob("cavesson-vllm-*"))
    process = begun([sys.executable, "-m", "cavesson", *arguments(tmp_path, folder)], tmp_path)
    assert servers()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while servers():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    for left in set(Path("/tmp").glob("cavesson-vllm-*")) - others:
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def test_a_server_with_old_weights_is_noticed(server: VllmServer, folder: Path, tmp_path: Path) -> None:
    """Somebody loads other weights into the server while a run samples from it."""
    engine = sampler(server, tmp_path / "weights", max_new_tokens=4)
    engine.sample(prompts(2), 0, range(2))
    engine.client.load_weights(folder, "older", while_sampling=False)
    with pytest.raises(
        ServerError, match=r"sampled with the weights older instead of [0-9a-f]{12}-[0-9a-f]{8}; was it restarted\?"
    ):
        engine.sample(prompts(2), 1, range(2))
