"""The settings of TRL's trainers on examples in ours: SFT, reward models, DPO, CPO, ORPO and KTO."""

from typing import Any

from cavesson.integrations.trl_recipe.common import COMMON, NoCounterpart, Rule, Values, longest, unless

SFT: dict[str, Rule] = {
    **COMMON,
    "max_length": longest,
    "truncation_mode": unless("keep_start", "longer examples lose their end"),
    "completion_only_loss": lambda only, _: {"data.learn": "all"} if only is False else {},
    "assistant_only_loss": unless(True, "of conversations, only the assistant's turns are learned: the same"),
    "dataset_text_field": lambda name, _: {} if name == "text" else {"data.columns": {"text": name}},
    "packing": unless(False, "a batch counts examples and not packed sequences: set batch_size"),
    "neftune_noise_alpha": lambda alpha, _: {"sft.neftune_alpha": float(alpha)} if alpha else {},
    "loss_type": lambda name, _: {} if name in ("nll", "chunked_nll") else unless("nll", "the loss is −log π")(name, _),
    "eos_token": unless(None, "the end token is that of the tokenizer and its chat template"),
}

REWARD_MODEL: dict[str, Rule] = {
    **COMMON,
    # TRL drops pairs that are too long; ours are cut unless told otherwise.
    "max_length": lambda length, values: {**longest(length, values), "data.overlong": "drop"},
    "center_rewards_coefficient": lambda weight, _: {"reward_model.centring_coef": float(weight)} if weight else {},
}


def _dpo_loss(names: Any, values: Values) -> dict[str, Any]:
    names = [names] if isinstance(names, str) else list(names)
    losses: dict[str, dict[str, Any]] = {
        "sigmoid": {},
        "hinge": {"dpo.loss_type": "hinge"},
        "ipo": {"dpo.loss_type": "ipo", "dpo.length_normalised": True},  # TRL's log-ratios are per token
        "sigmoid_norm": {"dpo.length_normalised": True},
    }
    if len(names) != 1 or names[0] not in losses:
        raise NoCounterpart(f"losses are {', '.join(losses)}")
    return losses[names[0]]


DPO: dict[str, Rule] = {
    **COMMON,
    "beta": "dpo.beta",
    "loss_type": _dpo_loss,
    "label_smoothing": unless(0.0, "TRL's default loss ignores it; dpo.label_smoothing is that of conservative DPO"),
    "max_length": longest,
    "truncation_mode": unless("keep_start", "longer examples lose their end"),
    "f_divergence_type": unless("reverse_kl", "only the reverse KL"),
    "ld_alpha": unless(None, "no loss has it"),
    "loss_weights": unless(None, "a run has one loss"),
    "use_weighting": unless(False, "pairs have equal weights"),
}


def _cpo_loss(name: str, _: Values) -> dict[str, Any]:
    losses: dict[str, dict[str, Any]] = {
        "sigmoid": {},
        "hinge": {"dpo.loss_type": "hinge"},
        "ipo": {"dpo.loss_type": "ipo", "dpo.length_normalised": True},
        "simpo": {"dpo.length_normalised": True},
    }
    if name not in losses:
        raise NoCounterpart(f"losses are {', '.join(losses)}")
    return {"dpo.reference_free": True, **losses[name]}


def _likelihood(weight: float, _: Values) -> dict[str, Any]:
    if weight:
        raise NoCounterpart('only dpo.loss_type = "orpo" learns the likelihood of the chosen response, too')
    return {}


_SMOOTH = ("sigmoid", "simpo")
"""Losses of CPO with a log σ, which label smoothing and, in SimPO, the margin belong to."""


def _pair_length(length: int | None, _: Values) -> dict[str, Any]:
    return {"data.max_length": 512 if length is None else length}  # what these trainers take for None


_WITHOUT_REFERENCE: dict[str, Rule] = {
    **COMMON,
    "beta": "dpo.beta",
    "max_length": _pair_length,
    "max_completion_length": unless(None, "TRL limits only the responses of encoder-decoder models so"),
    "is_encoder_decoder": unless(False, "models have a decoder only"),
}

CPO: dict[str, Rule] = {
    **_WITHOUT_REFERENCE,
    "loss_type": _cpo_loss,
    "cpo_alpha": _likelihood,
    "simpo_gamma": lambda margin, values: {"dpo.margin": float(margin)} if values["loss_type"] == "simpo" else {},
    "label_smoothing": lambda share, values: (
        {"dpo.label_smoothing": float(share)} if share and values["loss_type"] in _SMOOTH else {}
    ),
    "alpha": unless(0.0, "AlphaPO is not a loss of dpo.loss_type"),
}

ORPO: dict[str, Rule] = {
    **_WITHOUT_REFERENCE,
    "beta": lambda beta, _: {"dpo.loss_type": "orpo", "dpo.beta": float(beta)},
}

KTO: dict[str, Rule] = {
    **COMMON,
    "beta": "kto.beta",
    "loss_type": "kto.loss_type",
    "desirable_weight": "kto.desirable_weight",
    "undesirable_weight": "kto.undesirable_weight",
    "max_length": longest,
}
