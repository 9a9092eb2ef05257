"""What the TRL recorder notes of a run: the data type that the model computes in, and its end tokens."""

from types import SimpleNamespace

import pytest
import torch

from cavesson.integrations.trl_callback import dtype_of
from cavesson.integrations.trl_grouped import _ends, watch


def weights(*parts: tuple[int, torch.dtype]) -> torch.nn.Module:
    return torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(n, dtype=kind), False) for n, kind in parts])


@pytest.mark.parametrize(
    ("parts", "mixed", "found"),
    [
        ([(10, torch.float32)], {}, "float32"),
        ([(1000, torch.bfloat16), (10, torch.float32)], {}, "bfloat16"),  # adapters in float32
        ([(10, torch.float32)], {"bf16": True}, "bfloat16"),
        ([(10, torch.float32)], {"fp16": True}, "float16"),
    ],
)
def test_it_is_that_of_mixed_precision_or_of_most_weights(parts, mixed, found):
    assert dtype_of(weights(*parts), SimpleNamespace(**{"bf16": False, "fp16": False} | mixed)) == found


def test_without_a_model_it_is_not_known():
    assert dtype_of(None, SimpleNamespace(bf16=False, fp16=False)) is None


@pytest.mark.parametrize(("known", "found"), [([7, 9], {7, 9}), (None, {7}), ([9], {7, 9}), ([-1], {7})])
def test_all_end_tokens_count_that_the_trainer_or_the_tokenizer_knows(known, found):
    trainer = SimpleNamespace(processing_class=SimpleNamespace(eos_token_id=7))
    if known:  # TRL 1.16 has them
        trainer.eos_token_ids = known
    assert _ends(trainer) == found


@pytest.mark.parametrize(
    ("config", "beta", "found"),
    [
        ("GRPOConfig", 0.04, {"place": "loss", "estimator": "k3"}),
        ("RLOOConfig", 0.05, {"place": "reward", "estimator": "k1"}),
        ("GRPOConfig", 0.0, None),
        ("OtherConfig", 0.04, None),
    ],
)
def test_where_the_penalty_is_applied_is_that_of_the_trainer(config, beta, found):
    """TRL 1.16: GRPO adds k3 to the loss, RLOO subtracts k1 from the reward."""
    methods = dict.fromkeys(
        ("_generate_and_score_completions", "_calculate_rewards", "_get_per_token_logps_and_entropies", "_compute_loss")
    )
    kind = type("OwnConfig", (type(config, (), {}),), {})
    trainer = SimpleNamespace(
        args=kind(), beta=beta, processing_class=SimpleNamespace(eos_token_id=7), model=None, **methods
    )
    callback = SimpleNamespace(settings={})
    watch(trainer, callback)
    assert callback.settings.get("kl") == found
