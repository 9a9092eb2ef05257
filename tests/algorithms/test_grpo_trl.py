"""GRPO's loss and its gradient against TRL's."""

import pytest
import torch
from batch_helpers import ALONE
from group_helpers import accumulated, full, grpo, moved, trl_inputs, trl_trainer, uneven, weighted_means

from cavesson.ops.masked import weighted_mean
from cavesson.types import Scores

LOSS_TYPES = {"token": ("dapo", "bnpo"), "sequence": ("grpo",), "constant": ("dr_grpo",)}


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("normalise", LOSS_TYPES)
@pytest.mark.parametrize("with_kl", [False, True])
def test_loss_and_gradient_are_those_of_trl(normalise, ratio, with_kl):
    algorithm = grpo(normalise=normalise, ratio=ratio, clip_high=0.28)
    batch = algorithm.credit(full(uneven(kl_coef=torch.full((8,), 0.3 * with_kl))), 0.0, ALONE)
    loss, gradient = accumulated(algorithm, batch, moved(batch), len(batch))
    for loss_type in LOSS_TYPES[normalise]:
        logprob = moved(batch)
        trainer = trl_trainer(
            "GRPOTrainer",
            logprob=logprob,
            loss_type=loss_type,
            importance_sampling_level=ratio,
            beta=0.3 * with_kl,
        )
        inputs = trl_inputs(batch, old_per_token_logps=batch["logprob"], ref_per_token_logps=batch["ref_logprob"])
        theirs = trainer.loss(inputs)
        theirs.backward()
        assert loss == pytest.approx(theirs.item(), abs=1e-6)
        torch.testing.assert_close(gradient, logprob.grad)
        seen, logged = weighted_means(algorithm, batch, logprob), trainer._metrics["train"]
        if ratio == "token" and normalise != "sequence":  # TRL averages its metrics over tokens in any case
            assert seen["policy/clip_low"] == pytest.approx(logged["clip_ratio/low_mean"][0])
            assert seen["policy/clip_high"] == pytest.approx(logged["clip_ratio/high_mean"][0])
            assert seen["policy/clip_fraction"] == pytest.approx(logged["clip_ratio/region_mean"][0])
            assert 0 < seen["policy/clip_low"] != seen["policy/clip_high"] > 0
            if with_kl:
                assert seen["loss/kl"] == pytest.approx(logged["kl"][0], rel=1e-5)


def trl_weights(batch, level, mode, cap):
    """TRL's weights, as its trainer computes them before the loss."""
    difference = (batch["logprob"] - batch["sampler_logprob"]) * batch["learned"]
    ratio = (difference if level == "token" else difference.sum(-1, keepdim=True)).exp()
    return ratio.clamp(max=cap) if mode == "truncate" else ratio.masked_fill(ratio > cap, 0.0)


@pytest.mark.parametrize("importance_level", ["token", "sequence"])
@pytest.mark.parametrize("importance_mode", ["truncate", "mask"])
def test_importance_weights_are_those_of_trl(importance_level, importance_mode):
    algorithm = grpo(importance=1.2, clip_high=0.28, importance_level=importance_level, importance_mode=importance_mode)
    batch = algorithm.credit(full(uneven()), 0.0, ALONE)
    loss, gradient = accumulated(algorithm, batch, moved(batch), len(batch))
    logprob = moved(batch)
    weight = trl_weights(batch, importance_level, importance_mode, 1.2)
    trainer = trl_trainer("GRPOTrainer", logprob=logprob, loss_type="dapo", use_vllm=True, beta=0.3)
    inputs = trl_inputs(
        batch,
        old_per_token_logps=batch["logprob"],
        ref_per_token_logps=batch["ref_logprob"],
        importance_sampling_ratio=weight,
    )
    theirs = trainer.loss(inputs)
    theirs.backward()
    assert loss == pytest.approx(theirs.item(), abs=1e-6)
    torch.testing.assert_close(gradient, logprob.grad)


def test_trls_corrected_kl_has_the_gradient_of_k2_in_the_first_pass():
    algorithm = grpo(kl_estimator="k2")
    batch = algorithm.credit(full(uneven()), 0.0, ALONE)
    _, gradient = accumulated(algorithm, batch, batch["logprob"], len(batch))
    logprob = batch["logprob"].clone().requires_grad_()
    trainer = trl_trainer(
        "GRPOTrainer", logprob=logprob, loss_type="dapo", beta=0.3, args={"use_bias_correction_kl": True}
    )
    trainer.loss(trl_inputs(batch, ref_per_token_logps=batch["ref_logprob"])).backward()
    torch.testing.assert_close(gradient, logprob.grad)


def both(batch, algorithm, inputs=(), **settings):
    """Loss and gradient of ours and of TRL's."""
    loss, gradient = accumulated(algorithm, batch, moved(batch), len(batch))
    logprob = moved(batch)
    trainer = trl_trainer("GRPOTrainer", logprob=logprob, **settings)
    theirs = trainer.loss(
        trl_inputs(
            batch, old_per_token_logps=batch["logprob"], ref_per_token_logps=batch["ref_logprob"], **dict(inputs)
        )
    )
    theirs.backward()
    return (loss, gradient), (theirs.item(), logprob.grad)


VARIANTS = {
    "cispo": ({"loss_type": "cispo", "clip_high": 0.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
    "dual clip": ({"dual_clip": 1.3, "clip_high": 0.28}, {"loss_type": "dapo", "args": {"delta": 1.3}}),
    "off-policy": (
        {"off_policy_kl": 0.05},
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.05, "epsilon_high": 0.2},
    ),
    "unbiased KL": (
        {"kl_unbiased": True, "clip_high": 0.28},
        {"loss_type": "dapo", "beta": 0.3, "args": {"use_bias_correction_kl": True}},
    ),
}


@pytest.mark.parametrize(("ours", "theirs"), VARIANTS.values(), ids=VARIANTS)
def test_variants_are_those_of_trl(ours, theirs):
    with_kl = torch.full((8,), 0.3 * ("kl_unbiased" in ours))
    batch = full(uneven(kl_coef=with_kl))
    plain = {name: value for name, value in ours.items() if name == "clip_high"}
    batch = grpo().credit(batch, 0.0, ALONE)
    mine, trl = both(batch, grpo(**ours), **theirs)
    assert mine[0] == pytest.approx(trl[0], abs=1e-6)
    torch.testing.assert_close(mine[1], trl[1])
    without = accumulated(grpo(**plain), batch, moved(batch), len(batch))[1]
    assert (without - mine[1]).abs().max() > 0.01, "the setting must change something here"
    if "kl_unbiased" not in ours:  # then the loss is the policy loss
        assert weighted_means(grpo(**ours), batch, moved(batch))["loss/policy"] == pytest.approx(mine[0], abs=1e-6)


def test_the_entropy_bonus_is_that_of_trl():
    batch = grpo().credit(full(uneven(kl_coef=torch.zeros(8))), 0.0, ALONE)
    algorithm, logprob = grpo(entropy_coef=0.2, clip_high=0.28), moved(batch)
    entropy = (0.5 - logprob).detach().requires_grad_()
    ours = weighted_mean(
        algorithm.loss(Scores(logprob, entropy, None), batch).loss,
        algorithm.weights(batch),
        float(algorithm.total(batch)),
    )
    ours.backward()
    copy = entropy.detach().requires_grad_()
    trainer = trl_trainer(
        "GRPOTrainer",
        logprob=moved(batch),
        loss_type="dapo",
        _entropy_bonus_enabled=True,
        entropy_coef=0.2,
        use_adaptive_entropy=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (moved(batch), copy, None),
    )
    trainer.accelerator.sync_gradients = False
    theirs = trainer.loss(trl_inputs(batch, old_per_token_logps=batch["logprob"]))
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    torch.testing.assert_close(entropy.grad, copy.grad)
    assert entropy.grad.abs().max() > 0
