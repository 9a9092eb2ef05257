"""The traits of the algorithm of a run, also if run.json does not state them: of other trainers, and of older runs."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from cavesson.importers.fields import nested

_CRITIC = {"grouped": False, "critic": True, "clipped": True, "length_normalised": False}
_GROUP = {"grouped": True, "relative": True, "critic": False}
_STEP = {"grouped": False, "relative": True, "critic": False}
_OTHER_BASELINE = {"relative": False, "critic": False}
_NO_ADVANTAGES = {"grouped": False, "critic": False, "clipped": False, "length_normalised": False}
_EXAMPLES = _NO_ADVANTAGES | {"samples": False}
_ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": _CRITIC,
    "grpo": _GROUP | {"clipped": True},
    "rloo": _GROUP | {"clipped": True, "length_normalised": False},
    "raft": _NO_ADVANTAGES | {"ratio": None},
    "sft": _EXAMPLES,
    "dpo": _EXAMPLES,
    "kto": _EXAMPLES,
    "reward-model": _EXAMPLES | {"classifier": True},
    "reward": _EXAMPLES | {"classifier": True},
    "onlinedpo": _NO_ADVANTAGES,
    "nashmd": _NO_ADVANTAGES,
    "xpo": _NO_ADVANTAGES,
}
"""What older runs of Cavesson and TRL call an algorithm → what is known of it."""

OF_ESTIMATORS = {
    "gae": "ppo", "grpo": "grpo", "grpo_vectorized": "grpo", "group_norm": "grpo", "dr_grpo": "grpo", "rloo": "rloo",
    "rloo_vectorized": "rloo",
}  # fmt: skip
"""Advantage estimator of verl or OpenRLHF → the record's name of the algorithm; others have none."""
_ESTIMATORS: dict[str, dict[str, Any]] = {
    "gpg": _GROUP,
    "reinforce_plus_plus_baseline": _GROUP,
    "reinforce_baseline": _GROUP,
    "reinforce_plus_plus": _STEP,
    "reinforce": _STEP,
    "remax": _OTHER_BASELINE | {"grouped": False},
    "opo": _OTHER_BASELINE | {"grouped": True},
    "grpo_passk": _OTHER_BASELINE | {"grouped": True},
}
"""Their other estimators → what is known of them."""


class _Setting(NamedTuple):
    """A setting that decides a trait."""

    trait: str
    path: str
    """In run.json."""
    values: Mapping[Any, Any]
    """Value of the setting → of the trait, which is not known for other values."""


_RATIOS = {"token": "token", "sequence": "sequence"}
_MEANS = {
    "token-mean": False, "seq-mean-token-mean": True, "seq-mean-token-sum": False, "seq-mean-token-sum-norm": False,
}  # fmt: skip
_SETTINGS = (
    _Setting("kl_place", "kl.place", {"reward": "reward", "loss": "loss"}),
    _Setting("ratio", "config.grpo.ratio", _RATIOS),
    _Setting("ratio", "config.importance_sampling_level", _RATIOS),  # TRL
    _Setting("ratio", "config.actor_rollout_ref.actor.policy_loss.loss_mode", {"vanilla": "token", "gspo": "sequence"}),
    _Setting("ratio", "config.actor.policy_loss_type", {"ppo": "token", "gspo": "sequence"}),  # OpenRLHF
    _Setting("length_normalised", "config.grpo.normalise", {"token": False, "sequence": True, "constant": False}),
    _Setting(
        "length_normalised",
        "config.loss_type",  # TRL
        {"grpo": True, "sapo": True} | dict.fromkeys(("dr_grpo", "luspo", "bnpo", "dapo", "cispo", "vespo"), False),
    ),
    _Setting("length_normalised", "config.actor_rollout_ref.actor.loss_agg_mode", _MEANS),  # verl
    _Setting("length_normalised", "config.actor.loss_agg_mode", _MEANS),  # OpenRLHF
)


def traits_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return what run.json says of the algorithm, by the fields of `Traits`; what is not known is absent."""
    recorded = info.get("traits")
    if isinstance(recorded, Mapping):
        return dict(recorded)
    estimator = str(_at(info, "config.algorithm.adv_estimator") or _at(info, "config.algo.advantage.estimator"))
    name = str(info.get("algorithm") or OF_ESTIMATORS.get(estimator))
    found = dict(_ALGORITHMS.get(name) or _ESTIMATORS.get(estimator) or {})
    for trait, path, values in _SETTINGS:
        value = _at(info, path)
        if isinstance(value, str) and value in values:
            found[trait] = values[value]
    return found


def _at(info: Mapping[str, Any], path: str) -> Any:
    return nested(info, *path.split("."))


def section_of(info: Mapping[str, Any]) -> str:
    """Return the name of the group of settings that the algorithm of a run has; in older runs, it has the same name."""
    return str(info.get("section") or info.get("algorithm") or "").replace("-", "_")
