"""GRPO's loss and its gradient against TRL's."""

import pytest
import torch
from batch_helpers import ALONE
from group_helpers import accumulated, full, grpo, moved, trl_inputs, trl_trainer, uneven, weighted_means

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


def test_importance_weights_are_those_of_trl():
    algorithm = grpo(importance=1.2, clip_high=0.28)
    batch = algorithm.credit(full(uneven()), 0.0, ALONE)
    loss, gradient = accumulated(algorithm, batch, moved(batch), len(batch))
    logprob = moved(batch)
    weight = (batch["logprob"] - batch["sampler_logprob"]).exp().clamp(max=1.2)  # its mode "token_truncate"
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
