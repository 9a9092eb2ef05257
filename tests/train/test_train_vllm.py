"""Training with vLLM servers: what they are asked, and what happens when they fail or answer something wrong."""

import asyncio
import resource
import stat
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from account_helpers import account
from several_helpers import together
from starlette.responses import Response
from train_helpers import LORA, PROMPTS, STOP, quiet, settings, uneven
from transformers import AutoModelForCausalLM
from vllm_stand_in import ROUNDING, StandIn, serving

import cavesson
from cavesson.algorithms.grpo import GRPORun
from cavesson.algorithms.importance import CAP
from cavesson.config import load
from cavesson.errors import ServerError, UserError
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.rollout.engines.settings import VllmSettings
from cavesson.rollout.engines.vllm_client import VllmClient
from cavesson.train.loop import Report
from cavesson.train.run import Result, Training


def run(server: StandIn, folder: Path, report: Report = quiet, resume: bool = False, **changes: Any) -> Result:
    flags = {"sampling__engine": "vllm", "sampling__servers": [server.url], "sampling__vllm__attempts": 1, **changes}
    flags = {"model__path": str(server.folder), "optimizer__learning_rate": 1e-2, "checkpoint__every": 0, **flags}
    return Training(settings(folder, **flags), prompts=PROMPTS, rewards=uneven, resume=resume).run(report)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapters"])
def test_each_step_samples_from_the_weights_of_the_step(server: StandIn, tmp_path: Path, lora: Any) -> None:
    run(server, tmp_path / "run", model__lora=lora, steps=3)
    record = cavesson.open(tmp_path / "run")
    for step in range(3):
        tokens = record.tokens(step)
        for name in ("logprob", "sampler_logprob"):
            assert np.isfinite(tokens[name].to_numpy()).all()
        np.testing.assert_allclose(tokens["logprob"].to_numpy(), tokens["sampler_logprob"].to_numpy(), atol=ROUNDING)
    assert not (tmp_path / "run" / "sampling").exists()
    sampled = server.sampled
    prompts = {tuple(ids) for ids in record.rows(["prompt_ids"])["prompt_ids"].to_pylist()}
    assert {tuple(request["token_ids"]) for request in sampled} == prompts  # token ids, not text
    assert len({request["sampling_params"]["seed"] for request in sampled}) == len(sampled) == len(record.rows())
    assert server.paths.count("/update_weight_version") == 3


def test_a_server_with_a_key_answers_a_run_that_has_it(
    untied_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(untied_folder, key="a key") as server:
        with pytest.raises(ServerError, match=f"the vLLM server at {server.url} answered 401.*; set VLLM_API_KEY"):
            run(server, tmp_path / "without", steps=1)
        monkeypatch.setenv("VLLM_API_KEY", "a key")
        run(server, tmp_path / "with", steps=1)
    assert b"a key" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.slow
def test_the_same_seed_gives_the_same_responses(server: StandIn, untied_folder: Path, tmp_path: Path) -> None:
    run(server, tmp_path / "one")
    with serving(untied_folder) as other:
        run(other, tmp_path / "other")
    one, other_run = (cavesson.open(tmp_path / name).rows(["response"]) for name in ("one", "other"))
    assert one == other_run and len(set(one["response"].to_pylist())) > 1


def test_several_servers_share_the_responses(server: StandIn, untied_folder: Path, tmp_path: Path) -> None:
    with serving(untied_folder) as other:
        run(server, tmp_path / "run", sampling__servers=[server.url, other.url], steps=1)
        assert len(server.requests) == len(other.requests) == 1 + 3  # the probe, and half of the responses
        assert server.version == other.version != "default"


def sharded(url: str, folder: Path) -> None:
    flags = {"sampling__engine": "vllm", "sampling__servers": [url], "model__path": str(folder)}
    flags |= {"model__dtype": "bfloat16", "parallel__shard": "full", "checkpoint__every": 0, "steps": 1}
    Training(settings(Path("run"), **flags), prompts=PROMPTS, rewards=uneven).run(quiet)


@pytest.mark.slow
def test_sharded_weights_in_bfloat16_agree_with_the_server_within_their_rounding(
    untied_folder: Path, tmp_path: Path
) -> None:
    """While they are sharded, they are float32, but scores are computed in bfloat16."""
    certain: Any = AutoModelForCausalLM.from_pretrained(untied_folder)
    with torch.no_grad():
        certain.get_output_embeddings().weight.mul_(2)  # so that rounding moves log-probabilities by more than 0.001
    certain.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    with serving(tmp_path / "model") as server:
        for done in together(tmp_path, 2, sharded, server.url, server.folder):
            assert done.code == 0, done.err


@pytest.mark.slow
def test_a_server_that_keeps_its_weights_is_noticed(server: StandIn, tmp_path: Path) -> None:
    server.deaf = True
    for lora in (None, LORA):
        with pytest.raises(ServerError, match=r"has other weights than the policy: on a text of \d+ tokens"):
            run(server, tmp_path / f"{lora is None}", model__lora=lora)


def test_a_server_with_another_model_is_refused(server: StandIn, tmp_path: Path) -> None:
    tiny_model(seed=3).save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(ServerError, match=f"the vLLM server at {server.url} has other weights than the policy"):
        run(server, tmp_path / "run", model__path=str(tmp_path / "other"), model__lora=LORA)


def first(answer: Any) -> Any:
    return answer["choices"][0]


def changed(**fields: Any) -> Any:
    return lambda answer: answer | {"choices": [first(answer) | fields]}


def with_token(**fields: Any) -> Any:
    def spoil(answer: Any) -> Any:
        tokens = first(answer)["logprobs"]["content"]
        return changed(logprobs={"content": [tokens[0] | fields, *tokens[1:]]})(answer)

    return spoil


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda _: Response("<html>hello</html>"), "answered '<html>hello</html>'"),
        (lambda _: Response("", status_code=500), r"answered 500 Internal Server Error \(1 attempts\)"),
        (lambda _: Response("no", status_code=403), "answered 403 Forbidden: 'no'"),
        (lambda answer: answer | {"choices": []}, "choices: List should have at least 1 item"),
        (lambda answer: answer | {"choices": answer["choices"] * 2}, "choices: List should have at most 1 item"),
        (changed(token_ids=[]), "token_ids: List should have at least 1 item"),
        (changed(token_ids=[-1]), "token_ids.0: Input should be greater than or equal to 0"),
        (changed(token_ids=["5"]), "token_ids.0: Input should be a valid integer"),
        (changed(logprobs=None), "logprobs: "),
        (with_token(logprob="NaN"), r"logprob: "),
        (with_token(token_id=257), "log-probabilities of other tokens than those it has sampled"),
        (
            changed(weight_versions=[{"version": "old", "start": 0, "end": 9}]),
            "sampled with the weights old instead of [0-9a-f]{12}-",
        ),
        (changed(weight_versions=[]), "sampled with the weights of no version instead of"),
        (
            changed(token_ids=[7], logprobs={"content": [{"token_id": 7, "logprob": -1}]}),
            "a response that has no end",
        ),
        (
            changed(token_ids=[9999] * 6, logprobs={"content": [{"token_id": 9999, "logprob": -1}] * 6}),
            "answered the token 9999, but the model has 258",
        ),
    ],
)
def test_a_wrong_answer_ends_the_run_in_one_line(server: StandIn, tmp_path: Path, spoil: Any, said: str) -> None:
    server.spoil = spoil
    lengths = {"sampling__random_length": None, "sampling__max_new_tokens": 6}
    with pytest.raises(ServerError, match=said) as raised:
        run(server, tmp_path / "run", **lengths)
    assert len(str(raised.value).splitlines()) <= 2
    assert not (tmp_path / "run").exists()  # nothing was recorded, and the corrected command needs the folder


def test_a_server_that_stalls_is_named(server: StandIn, tmp_path: Path) -> None:
    server.delay = 5.0
    with pytest.raises(ServerError, match=r"vLLM server at .* did not answer within 0.5 seconds \(1 attempts\)"):
        run(server, tmp_path / "run", sampling__vllm__timeout=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing", "said"),
    [
        ({"spoil": lambda _: Response("", status_code=503)}, "answered 503 Service Unavailable"),
        ({"spoil": lambda _: Response("<html>hello</html>")}, "answered '<html>hello</html>'"),
        ({"delay": 8.0}, "did not answer within 2 seconds"),
        ({"deaf": True}, "has other weights than the policy"),
        (
            {"spoil": changed(weight_versions=[{"version": "old", "start": 0, "end": 9}])},
            "with the weights old instead",
        ),
    ],
    ids=["gone", "garbage", "stalled", "deaf", "old weights"],
)
def test_a_server_that_fails_after_a_step_leaves_a_run_that_resumes(
    server: StandIn, untied_folder: Path, tmp_path: Path, failing: dict[str, Any], said: str
) -> None:
    changes = {"model__lora": LORA, "steps": 3, "sampling__vllm__timeout": 2 if "delay" in failing else 60}

    def fail(step: int, metrics: dict[str, float]) -> None:
        for name, value in failing.items():
            setattr(server, name, value)

    with pytest.raises(ServerError, match=said) as raised:
        run(server, tmp_path / "run", report=fail, **changes)
    assert "the steps before step 1 are recorded" in str(raised.value) and "resume=True" in raised.value.__notes__[0]
    before = cavesson.open(tmp_path / "run").rows(["response"])["response"].to_pylist()
    with serving(untied_folder) as other:
        run(other, tmp_path / "run", resume=True, **changes | {"sampling__vllm__timeout": 60})
    account(tmp_path / "run", PROMPTS, 3)
    assert cavesson.open(tmp_path / "run").rows(steps=[0])["response"].to_pylist() == before


def test_weights_of_a_killed_attempt_are_removed_by_the_next(server: StandIn, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(server, folder, steps=1)
    left = folder / "sampling" / "0123456789ab-cdef"
    left.mkdir(parents=True)
    (left / "model.safetensors").touch()
    run(server, folder, resume=True, steps=2)
    assert not left.parent.exists()


def test_parameters_mean_what_they_mean_without_a_server(server: StandIn, tmp_path: Path) -> None:
    sampling = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_new_tokens": 2, "stop": ["x", "<|pad|>"]}
    run(server, tmp_path / "run", steps=1, **{f"sampling__{name}": value for name, value in sampling.items()})
    params = [one["sampling_params"] for one in server.sampled]
    for one in params:
        assert {name: one[name] for name in ("temperature", "top_k", "top_p")} == {
            "temperature": 0.7, "top_k": 9, "top_p": 0.8
        }  # fmt: skip
        assert one["min_tokens"] == min(2, one["max_tokens"]) and one["ignore_eos"] is True
        assert one["stop"] == ["x"] and one["stop_token_ids"] == [0]  # the pad token may come before two tokens
    assert {one["max_tokens"] for one in params} <= set(range(1, 7)) and len(params) == 6
    for row in cavesson.open(tmp_path / "run").rows(["response", "finish_reason"]).to_pylist():
        assert "x" not in row["response"]


def test_a_server_that_finds_a_stop_text_elsewhere_changes_nothing(
    server: StandIn, untied_folder: Path, tmp_path: Path
) -> None:
    run(server, tmp_path / "one", sampling__stop=STOP, steps=1)
    with serving(untied_folder) as hasty:
        hasty.hasty = True
        run(hasty, tmp_path / "other", sampling__stop=STOP, steps=1)
        assert len(hasty.requests) > len(server.requests)
    one, other = (cavesson.open(tmp_path / name).rows(["response", "finish_reason"]) for name in ("one", "other"))
    assert one == other


def test_requests_leave_half_of_the_files_that_the_process_may_open() -> None:
    most, now = 0, 0

    async def ask(client: httpx.AsyncClient) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1

    client = VllmClient(["http://127.0.0.1:1", "http://127.0.0.1:2"], VllmSettings())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
        client._together([ask] * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert most == 300  # of 512 that two servers get at most


def test_importance_weights_are_on_with_another_engine() -> None:
    for flags, cap in (([], 0.0), (["--sampling.engine=vllm"], CAP), (["--grpo.importance=3"], 3.0)):
        assert load(GRPORun, None, flags).algorithm.importance == cap
    off = load(GRPORun, None, ["--sampling.engine=vllm", "--grpo.importance=0"])
    assert off.algorithm.importance == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--sampling.servers", '["http://a:1"]'], 'servers has no effect without engine "vllm"'),
        (["--sampling.vllm.devices", "[1]"], 'vllm has no effect without engine "vllm"'),
        (["--sampling.engine", "vllm", "--sampling.batch_size", "2"], "batch_size has no effect with engine"),
        (
            ["--sampling.engine", "vllm", "--sampling.servers", '["http://a:1"]', "--sampling.vllm.devices", "[1]"],
            "vllm.devices has no effect with servers",
        ),
        (["--sampling.engine", "vllm", "--sampling.servers", '["a:1"]'], "'a:1' is not the URL of a server"),
        (
            ["--sampling.engine", "vllm", "--sampling.servers", '["http://u:p@a"]'],
            "servers.0 has what looks like a password",
        ),
        (
            ["--sampling.engine", "vllm", "--model.path", "x", "--model.quantization", "nf4", "--model.lora", "{}"],
            "model.quantization has no effect with sampling.engine",
        ),
        (
            ["--sampling.engine", "vllm", "--model.lora.dora", "true"],
            "model.lora.dora has no effect with sampling.engine",
        ),
    ],
)
def test_settings_that_make_no_sense_together(flags: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load(GRPORun, None, flags)


def test_without_vllm_the_message_says_how_to_install_it(tmp_path: Path) -> None:
    changes = {"sampling__engine": "vllm"}
    for python, said in ((sys.executable, "-m pip install vllm"), ("/nowhere/python", "/nowhere/python: No such file")):
        given = settings(tmp_path / "run", **changes, sampling__vllm__python=python)
        with pytest.raises(UserError, match=said):
            Training(given, prompts=PROMPTS, rewards=uneven)
    assert not (tmp_path / "run").exists()


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    python = tmp_path / "python"
    logged = "(Worker pid=3) ERROR 11-23 [x.py:5] RuntimeError: no GPU"  # the cause, before what follows from it
    printed = f'echo starting\necho "{logged}"\necho "ValueError: engine died"\nexit 7\n'
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\n{printed}')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    given = settings(tmp_path / "run", sampling__engine="vllm", sampling__vllm__python=str(python))
    with pytest.raises(UserError, match=r"the vLLM server ended with exit code 7: RuntimeError: no GPU"):
        Training(given, prompts=PROMPTS, rewards=uneven)
    assert not (tmp_path / "run").exists()
