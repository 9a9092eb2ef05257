"""What a record shows although no trainer measured it: another scoring, another sampler, a ban, an entropy."""

import numpy as np
import pytest
from doctor_helpers import LENGTH, WORDS, Made, healthy, log_softmax, reading
from late import BEFORE, begun, late, short
from sick import put, resample
from sick_invariants import noisy_reference
from test_doctor_rules import BY_NAME

from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.onset import with_onset
from cavesson.doctor.reading import Curve, Reading
from cavesson.doctor.rules import RULES
from cavesson.doctor.rules.diversity import entropy
from cavesson.doctor.series import Series

ERROR = "steps.policy/first_approx_kl"


def trained_at(made: Made, temperature: float) -> float:
    """Let training divide the logits by a temperature that scoring lacks; return the error, a root mean square."""
    del made.metrics["policy/first_ratio_error"]
    off = (log_softmax(made.policy[0] / temperature) - made.policy[0])[made.tokens["token_id"][0]][made.mask[0]]
    made.metrics["policy/approx_kl"][0] += 0.5 * np.mean(off**2)
    return float(np.sqrt(np.mean(off**2)))


@pytest.mark.parametrize("temperature", [0.7, 0.9, 1.3])
def test_a_temperature_in_training_alone_shows_in_the_first_step(temperature, tmp_path):
    made = healthy()
    error = trained_at(made, temperature)
    data = made.data(tmp_path / "run")
    # The policy itself moves 0.25 / 24 of its drift in a step, by about 0.01 nats per token.
    assert error - 0.03 < np.sqrt(2 * data.metric("policy/first_approx_kl").value[0]) < error
    (found,) = diagnose(data, [BY_NAME["ratio-not-one"]]).findings
    assert found.reading.since == 0 and found.derived[0].gives == (ERROR,)


@pytest.mark.parametrize("times", [0.98, 1.9])
def test_a_movement_that_the_next_step_explains_is_no_difference_in_scoring(times, tmp_path):
    """The policy may move nearly twice as far on the responses that it learned from as on the next ones."""
    made = healthy()
    trained_at(made, 1.0)
    delta = made.policy[1][made.tokens["token_id"][1]] - made.policy[0][made.tokens["token_id"][1]]
    made.metrics["policy/approx_kl"][0] = 0.5 * times**2 * np.mean(delta[made.mask[1]] ** 2)
    assert not made.data(tmp_path / "run").has(ERROR)


def next_step_of_the_same_policy(made):
    made.rows["policy_version"][1] = 0


def next_step_not_further_away(made):
    made.tokens["ref_logprob"][1] = made.tokens["logprob"][1]


def another_reference(made):
    noisy_reference(made, 1.0)


def not_from_the_beginning(made):
    made.rows["policy_version"] = made.rows["policy_version"] + 7


def first_update_not_logged(made):
    made.metrics["policy/approx_kl"][0] = np.nan


@pytest.mark.parametrize(
    "change",
    [
        next_step_of_the_same_policy,
        next_step_not_further_away,
        another_reference,
        not_from_the_beginning,
        first_update_not_logged,
    ],
)
def test_nothing_is_derived_where_the_first_two_steps_do_not_bound_the_movement(change, tmp_path):
    made = healthy()
    trained_at(made, 0.8)
    change(made)
    assert not made.data(tmp_path / "run").has(ERROR)


def from_other_weights(made: Made) -> None:
    """Samples from weights that are not those of the policy, and records no log-probabilities of them."""
    resample(made, lambda policy: log_softmax(policy[::-1]))
    del made.tokens["sampler_logprob"]


def surprise(made: Made) -> float:
    """Return E[−log π] − H(π) for tokens of `from_other_weights`, weighted by the steps' numbers of tokens."""
    of_step = [-np.exp(one[::-1]) @ one + np.exp(one) @ one for one in made.policy]
    return float(np.average(of_step, weights=made.mask.sum((1, 2))))


def test_tokens_of_other_weights_surprise_the_policy_by_more_than_its_entropy(tmp_path):
    made = healthy()
    from_other_weights(made)
    found = reading(BY_NAME["sampler-mismatch"], made, tmp_path / "run")
    noise = np.sqrt(np.exp(made.policy[0]) @ made.policy[0] ** 2 / made.mask.sum())
    assert found.unhealthy and found.seen == pytest.approx(surprise(made), abs=4 * noise)


def test_other_weights_are_found_when_they_began(tmp_path):
    def unmeasured(made: Made) -> None:
        del made.tokens["sampler_logprob"]

    data = late(from_other_weights, begun(tmp_path / "begun", "grpo", unmeasured), tmp_path / "run")
    (found,) = diagnose(data, [BY_NAME["sampler-mismatch"]]).findings
    assert abs(found.reading.since - BEFORE) <= 3


@pytest.mark.parametrize("seed", range(3))
def test_the_policy_is_not_surprised_by_its_own_tokens(seed, tmp_path):
    made = healthy(seed=seed)
    del made.tokens["sampler_logprob"]
    found = reading(BY_NAME["sampler-mismatch"], made, tmp_path / "run")
    noise = np.sqrt(np.exp(made.policy[0]) @ made.policy[0] ** 2 / made.mask.sum())
    assert not found.unhealthy and abs(found.seen) < 4 * noise


@pytest.mark.parametrize(("gap", "sick"), [(0.02, False), (0.04, True)])
def test_a_small_surprise_does_not_matter_however_certain_it_is(gap, sick, tmp_path):
    made = healthy()
    del made.tokens["sampler_logprob"]
    made.tokens["entropy"] = np.where(made.mask, -made.tokens["logprob"] - gap, 0.0)
    found = reading(BY_NAME["sampler-mismatch"], made, tmp_path / "run")
    assert found.unhealthy == sick and found.seen == pytest.approx(gap, abs=1e-3)  # columns are rounded


def short_unmeasured(made: Made) -> None:
    short(made)
    del made.tokens["sampler_logprob"]


def ban(made: Made, least: int = 10) -> None:
    """No response ends before a length; after it, six of ten that are left end with every token.

    The sampler's log-probabilities, which would show a ban, are not recorded.
    """
    del made.tokens["sampler_logprob"]
    del made.info["config"]["sampling"]["min_new_tokens"]
    length = np.minimum(least - 1 + np.random.default_rng(4).geometric(0.6, made.mask.shape[:2]), LENGTH)
    made.tokens["mask"] = np.arange(LENGTH) < length[..., None]
    made.settle()


def learned(made: Made) -> None:
    """The same lengths, but in the first four steps some responses are still short."""
    ban(made)
    for step, share in enumerate((0.6, 0.4, 0.2, 0.05)):
        few = int(share * made.mask.shape[1])
        made.tokens["mask"][step, :few] &= np.arange(LENGTH) < np.random.default_rng(step).integers(1, 9, few)[:, None]
    made.settle()


def test_a_ban_on_early_ends_that_begins_late_is_found_where_it_began(tmp_path):
    data = late(ban, begun(tmp_path / "begun", "ppo", short_unmeasured), tmp_path / "run")
    (found,) = diagnose(data, [BY_NAME["end-forbidden"]]).findings
    assert found.reading.since == BEFORE and found.reading.between == (BEFORE, BEFORE)
    assert found.reading.words["least"] == 10


def test_a_policy_that_learns_to_write_more_is_not_forbidden_to_end(tmp_path):
    data = late(learned, begun(tmp_path / "begun", "ppo", short_unmeasured), tmp_path / "run")
    assert diagnose(data, [BY_NAME["end-forbidden"]]).findings == ()


def heated(made: Made, last: float) -> None:
    """The distribution is sharp at first and, at the end, nearly uniform for an exponent of 0."""
    for step, power in enumerate(np.linspace(1.3, last, len(made.policy))):
        made.policy[step] = log_softmax(made.policy[0] * power)
        chance = np.random.default_rng(step)
        ids = chance.choice(len(WORDS), made.mask.shape[1:], p=np.exp(made.policy[step]))
        put(made, step, ids, made.policy[step])
        made.tokens["entropy"][step] = -np.exp(made.policy[step]) @ made.policy[step]


@pytest.mark.parametrize(("last", "sick"), [(0.05, True), (0.9, False)])
def test_of_few_tokens_an_almost_uniform_choice_is_an_explosion(last, sick, tmp_path):
    made = healthy()
    heated(made, last)
    found = reading(BY_NAME["entropy-explosion"], made, tmp_path / "run")
    assert found.unhealthy == sick
    # Half of the tokens more than once and a half of the entropy at the start would be more than there is.
    assert 1.5 * found.words["before"] > np.log(len(WORDS))


def test_the_entropy_is_that_of_the_tokens_where_a_trainer_counts_padding(tmp_path):
    made = healthy()
    del made.tokens["entropy"]
    made.metrics["policy/entropy"] = np.full(24, 0.5)
    found = entropy(made.data(tmp_path / "run"))
    expected = [-values[inside].mean() for values, inside in zip(made.tokens["logprob"], made.mask, strict=True)]
    np.testing.assert_allclose(found.value, expected, rtol=1e-6)


def test_a_collapse_of_the_entropy_explains_a_reward_that_falls_with_it(tmp_path):
    made = healthy()
    made.tokens["entropy"] *= np.geomspace(1, 0.03, 24)[:, None, None]
    made.rows["reward"] -= np.linspace(0, 3, 24)[:, None]
    made.settle()
    found = diagnose(made.data(tmp_path / "run"), RULES)
    (cause,) = (one for one in found.causes if one.rule.name in ("entropy-collapse", "reward-falls"))
    assert cause.rule.name == "entropy-collapse" and "reward-falls" in cause.explains


def test_a_problem_began_no_later_than_the_rule_sees_it(tmp_path):
    """A length that grows faster and faster until the limit: most of the change comes late."""
    lengths = [14.5, 14.2, 14.8] * 5 + [18.0, 19.0, 21.0, 25.0, 30.0, 37.0] + [48.0] * 29
    points = Series(np.arange(len(lengths)), np.array(lengths))
    data = healthy(steps=len(lengths), batch=8).data(tmp_path / "run")
    found = with_onset(Reading(0.9, True, 15, curve=Curve(points, high=18.0)), data)
    assert found.since == 15 and found.between[0] <= 15 <= found.between[1]
