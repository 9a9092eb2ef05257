"""A real vLLM server as the teacher of a distillation: `make test-engines` installs vLLM and runs this test."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import cavesson
from cavesson.algorithms.distill import DistillRun
from cavesson.models.tiny import tiny_tokenizer
from cavesson.rollout.engines.settings import VllmSettings
from cavesson.rollout.engines.vllm_server import VllmServer, saved_model
from cavesson.train.run import Training

PYTHON = os.environ.get("CAVESSON_TEST_VLLM", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs vLLM in a separate environment: make test-engines"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
LENGTH = 1024
"""The texts by which vocabularies are compared have up to 512 tokens."""


def model(seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=0,
        pad_token_id=1, initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def saved(seed: int, folder: Path) -> Path:
    model(seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def teacher() -> Iterator[VllmServer]:
    place = saved_model(model(1), tiny_tokenizer(), is_trained=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # by default, a server on a CPU takes most of the memory
        server = VllmServer(place, VllmSettings(python=PYTHON, arguments=("--enforce-eager",)), "float32", LENGTH, None)
        patch.setenv("VLLM_API_KEY", server.key)
        yield server
    server.close()


def test_a_teacher_on_vllm_is_one_in_the_process(teacher: VllmServer, tmp_path: Path) -> None:
    policy = saved(0, tmp_path / "policy")

    def distilled(name: str, source: dict[str, Any]) -> cavesson.record.Run:
        values: dict[str, Any] = {
            "run": tmp_path / name, "steps": 3, "batch_size": 8, "model": {"path": str(policy), "device": "cpu"},
            "teacher": source, "sampling": {"max_new_tokens": 12}, "checkpoint": {"every": 0},
        }  # fmt: skip
        Training(DistillRun.model_validate(values), prompts=["My dog", "On the table"]).run(lambda step, metrics: None)
        return cavesson.open(tmp_path / name)

    remote = distilled("remote", {"servers": [teacher.url]})
    local = distilled("local", {"path": str(saved(1, tmp_path / "teacher"))})
    for step in range(3):
        one, other = remote.tokens(step), local.tokens(step)
        assert one["token_id"] == other["token_id"]
        scores = one["teacher_logprob"].to_numpy()
        np.testing.assert_allclose(scores, other["teacher_logprob"].to_numpy(), atol=1e-4)
        assert np.abs(scores - one["logprob"].to_numpy()).max() > 0.1
