"""The temperature that tokens were drawn at, from their surprise and the entropies of the distributions alone."""

from pathlib import Path

import numpy as np
import pytest
from doctor_helpers import LENGTH, Made, healthy, log_softmax
from sick import put

from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.rules import RULES
from cavesson.doctor.rules.temperature import entropy_temperature

TOKENS, VOCABULARY = 6000, 200


def drawn(temperature: float = 1.0, top_k: int = VOCABULARY, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return surprise and entropy of tokens of different contexts, under the distribution that was not changed."""
    chance = np.random.default_rng(seed)
    scale = chance.uniform(0.5, 6, (TOKENS, 1))
    scores = log_softmax(scale * chance.normal(size=(TOKENS, VOCABULARY)))
    lowest = np.sort(scores, 1)[:, -top_k][:, None]
    sampler = np.where(scores >= lowest, scores / temperature, -np.inf)
    ids = (sampler + chance.gumbel(size=scores.shape)).argmax(1)  # the Gumbel-max trick draws from softmax(sampler)
    return -scores[np.arange(TOKENS), ids], -(np.exp(scores) * scores).sum(1)


@pytest.mark.parametrize("temperature", [0.6, 0.8, 0.95, 1.0, 1.2, 1.5])
def test_the_temperature_is_found(temperature: float) -> None:
    for seed in range(3):
        # Four standard errors: of 0.01 near 1, and more where tokens are far more or less probable than their scores.
        found = entropy_temperature(*drawn(temperature, seed=seed))
        assert found == pytest.approx(temperature, abs=0.04 if 0.7 < temperature < 1.3 else 0.1)


@pytest.mark.parametrize("top_k", [3, 8, 20, 40])
def test_a_filter_is_not_a_temperature(top_k: int) -> None:
    for seed in range(3):
        assert entropy_temperature(*drawn(top_k=top_k, seed=seed)) is None


@pytest.mark.parametrize("entropy", [0.5, 2.0])
def test_contexts_that_are_all_alike_tell_no_temperature(entropy: float) -> None:
    surprise = np.random.default_rng(0).exponential(entropy, 1000) * 0.8
    assert entropy_temperature(surprise, np.full(1000, entropy)) is None


def draw_in_contexts(made: Made, temperature: float, flattest: float = 0.5, sharpest: float = 3.0) -> None:
    """Draw all tokens again, from distributions that are the sharper the later a token stands."""
    chance, sharpness = np.random.default_rng(0), np.linspace(flattest, sharpest, LENGTH)
    for step in range(len(made.mask)):
        tables = np.stack([log_softmax(made.policy[step] * scale) for scale in sharpness])
        sampler = np.stack([log_softmax(table / temperature) for table in tables])
        ids = np.stack([chance.choice(len(row), len(made.mask[step]), p=np.exp(row)) for row in sampler], 1)
        put(made, step, ids, made.policy[step])
        places = np.arange(LENGTH)
        made.tokens["logprob"][step] = np.where(made.mask[step], tables[places, ids], 0.0)
        made.tokens["sampler_logprob"][step] = np.where(made.mask[step], sampler[places, ids], 0.0)
        entropy = -(np.exp(tables) * tables).sum(-1)
        made.tokens["entropy"][step] = np.where(made.mask[step], entropy, 0.0)
        start = np.stack([log_softmax(made.policy[0] * scale) for scale in sharpness])
        made.tokens["ref_logprob"][step] = np.where(made.mask[step], start[places, ids], 0.0)
    made.settle()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_a_record_without_the_samplers_scores(temperature: float, tmp_path: Path) -> None:
    made = healthy("grpo")
    draw_in_contexts(made, temperature)
    del made.tokens["sampler_logprob"]
    found = diagnose(made.data(tmp_path), RULES)
    named = [one.rule.name for one in found.causes if one.rule.name in ("temperature-missing", "filtered-sampling")]
    assert named == ([] if temperature == 1 else ["temperature-missing"])
    if named:
        assert found.causes[0].reading.seen == pytest.approx(temperature, rel=0.05)


def test_a_cold_sampler_that_is_sure_of_most_tokens(tmp_path: Path) -> None:
    """Hardly any token becomes less likely, as under a filter, but those few become much less likely."""
    made = healthy("grpo", batch=64)
    draw_in_contexts(made, 0.6, 6.0, 24.0)
    gap = (made.tokens["sampler_logprob"] - made.tokens["logprob"])[made.mask]
    assert (gap < -0.01).sum() < 0.05 * (np.abs(gap) > 0.01).sum()
    named = {"temperature-missing", "filtered-sampling"}
    found = diagnose(made.data(tmp_path), [rule for rule in RULES if rule.name in named])
    assert [one.rule.name for one in found.causes] == ["temperature-missing"]
    assert found.causes[0].reading.seen == pytest.approx(0.6, rel=0.1)
