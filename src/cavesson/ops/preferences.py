"""Losses over pairs of a chosen and a rejected response, one number per pair, and over single labelled responses.

The losses of the DPO family depend on Δ = chosen log-ratio − rejected log-ratio, where a log-ratio is
log π(y|x) − log π_ref(y|x) of a whole response (`ratios.log_ratio`). Three variants are the same functions with
different inputs: *length-normalised* takes log-ratios divided by the number of tokens in the response
(`ratios.mean_log_ratio`; arXiv:2411.15124, eq. 6), *reference-free* takes log π(y|x) alone, and the combination of both
with a margin is SimPO (arXiv:2405.14734).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], margin: Float[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """Return −log σ(r_chosen − r_rejected − m) (arXiv:2203.02155, eq. 1; the margin m: arXiv:2307.09288, eq. 2).

    A margin of 0 gives the plain Bradley–Terry likelihood.
    """
    return -logsigmoid(chosen - rejected - margin)


def centring(chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return (r_chosen + r_rejected)², which a reward model adds with a small weight η (arXiv:2312.09244, section 2).

    Bradley–Terry depends only on differences of rewards; this term determines their zero point.
    """
    return (chosen + rejected) ** 2


def dpo(
    chosen_logratio: Float[Tensor, " B"],
    rejected_logratio: Float[Tensor, " B"],
    beta: float,
    label_smoothing: float,
    margin: float = 0.0,
) -> Float[Tensor, " B"]:
    """Return −(1 − ε)·log σ(β·Δ − γ) − ε·log σ(γ − β·Δ) (arXiv:2305.18290, eq. 7; γ: arXiv:2405.14734, eq. 6).

    ε = `label_smoothing` is the assumed share of pairs with swapped labels: conservative DPO
    (https://ericmitchell.ai/cdpo.pdf, eq. 3). γ = `margin` is what β·Δ must exceed for σ to be over ½. With ε = γ = 0,
    it is plain DPO, whose loss is log 2 if policy and reference agree.
    """
    logit = beta * (chosen_logratio - rejected_logratio) - margin
    return -(1 - label_smoothing) * logsigmoid(logit) - label_smoothing * logsigmoid(-logit)


def ipo(
    chosen_logratio: Float[Tensor, " B"], rejected_logratio: Float[Tensor, " B"], beta: float
) -> Float[Tensor, " B"]:
    """Return (Δ − 1/(2·β))² (arXiv:2310.12036, eq. 17, where β is called τ).

    TRL passes log-ratios per token, as confirmed by the paper's authors.
    """
    return (chosen_logratio - rejected_logratio - 1 / (2 * beta)) ** 2


def hinge(
    chosen_logratio: Float[Tensor, " B"], rejected_logratio: Float[Tensor, " B"], beta: float
) -> Float[Tensor, " B"]:
    """Return max(0, 1 − β·Δ) (SLiC, arXiv:2305.10425; on log-ratios as in RSO, arXiv:2309.06657, section 3)."""
    return (1 - beta * (chosen_logratio - rejected_logratio)).clamp_min(0.0)


def orpo(chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], beta: float) -> Float[Tensor, " B"]:
    """Return −log p(chosen) − β·log σ(log(odds(chosen) / odds(rejected))) (arXiv:2403.07691, eq. 6 and 7, β = λ there).

    Both are mean log-probabilities log p of a response's tokens, and odds = p/(1 − p).
    """
    return -chosen - beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def kto(
    logratio: Float[Tensor, " B"], is_good: Bool[Tensor, " B"], reference_point: Float[Tensor, " B"], beta: float
) -> Float[Tensor, " B"]:
    """Return 1 − σ(β·(Δ − z₀)) of a good response and 1 − σ(β·(z₀ − Δ)) of a bad one (arXiv:2402.01306, section 4.1).

    Here Δ is the log-ratio of a single response, and z₀ the reference point, an estimate of KL(π ‖ π_ref) ≥ 0. With
    z₀ = 0, it is APO-zero on unpaired data (arXiv:2408.06266, eq. 7).
    """
    gain = beta * (logratio - reference_point)
    return torch.sigmoid(torch.where(is_good, -gain, gain))


def right(difference: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return 1 where a difference is positive and 0 where it is negative; less than 0.001 is rounding, and gives ½."""
    return torch.where(difference.abs() < 1e-3, 0.5, (difference > 0).float())


def _log_odds(logprob: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    below_one = logprob.clamp_max(-(2.0**-24))  # half the spacing of float32 at 1; the odds of p = 1 are infinite
    return below_one - (-below_one.expm1()).log()
