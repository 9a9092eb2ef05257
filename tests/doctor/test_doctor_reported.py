"""What reported mistakes in trainers leave in a record: advantages, ratios, lengths and words."""

from pathlib import Path

import numpy as np
import pytest
from doctor_helpers import LENGTH, Array, Made, healthy, reading

from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.rules.diversity import distinct_collapse, template_collapse
from cavesson.doctor.rules.invariants import ratio_not_one
from cavesson.doctor.rules.reward import query_dominated
from cavesson.doctor.rules.sampling import end_forbidden
from cavesson.doctor.rules.update import advantage_scale

HALF = 12
"""The step at which something begins, in the middle of the run."""


def test_each_response_whitened_alone(tmp_path: Path) -> None:
    made = healthy()
    for row in np.ndindex(*made.mask.shape[:2]):
        inside, values = made.mask[row], made.tokens["advantage"][row]
        values[inside] = (values[inside] - values[inside].mean()) / (values[inside].std() or 1.0)
    found = reading(advantage_scale, made, tmp_path)
    assert found.unhealthy and found.since == 0 and "each response alone" in str(found.words["how"])
    assert found.seen == pytest.approx(1, abs=0.1) and found.words["mean"] == pytest.approx(0, abs=0.1)
    made.info = {}
    assert made.data(tmp_path / "bare").setting("config.ppo.whiten_advantages") is True


@pytest.mark.parametrize(("updates", "epsilon", "sick"), [(1, 0.2, True), (4, 0.2, False), (1, 3e-4, False)])
def test_clipped_tokens_where_nothing_has_changed(updates: int, epsilon: float, sick: bool, tmp_path: Path) -> None:
    """With a single update per step the ratio is 1 everywhere, so that no token is clipped."""
    made = healthy()
    made.metrics = {"clip_ratio/region_mean": np.full(24, 0.16)}
    made.info = {"trainer": "trl 1.16.0", "config": {
        "num_iterations": 1, "steps_per_generation": updates, "gradient_accumulation_steps": 1,
        "epsilon": epsilon,
    }}  # fmt: skip
    found = diagnose(made.data(tmp_path), [ratio_not_one])
    assert bool(found.findings) == sick
    if sick:
        # A clipped token is off by 0.2 at least, so the root mean square of all is √0.16 · 0.2.
        assert found.findings[0].reading.seen == pytest.approx(0.08)
    elif updates > 1:
        assert [one.rule for one in found.skipped] == ["ratio-not-one"]


def test_no_clipped_token_does_not_exclude_a_wrong_ratio(tmp_path: Path) -> None:
    made = healthy()
    made.metrics = {"clip_ratio/region_mean": np.zeros(24)}
    made.info["config"] |= {
        "num_iterations": 1,
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
        "epsilon": 0.2,
    }
    assert [one.rule for one in diagnose(made.data(tmp_path), [ratio_not_one]).skipped] == ["ratio-not-one"]


def test_scores_by_prompt_are_found_from_where_they_begin(tmp_path: Path) -> None:
    """The spread of all rewards does not change; that within the groups does."""
    made, begins = healthy(steps=64), 32
    reward = made.rows["reward"]
    made.rows["group"] = made.rows["group"] + 100 * np.arange(64)[:, None]  # no prompt recurs
    for step in range(begins, len(reward)):
        for group in np.unique(made.rows["group"][step]):
            members = np.flatnonzero(made.rows["group"][step] == group)
            reward[step, members] = reward[step, members[0]]
    (found,) = diagnose(made.data(tmp_path), [query_dominated]).findings
    assert found.reading.since is not None and abs(found.reading.since - begins) <= 2


@pytest.mark.parametrize("form", [True, False])
def test_a_form_that_sets_the_length_is_not_a_ban_on_short_answers(form: bool, tmp_path: Path) -> None:
    """Verses of 8 or 16 words have nothing between; after a ban before the eighth word, others end soon."""
    made, chance = healthy(), np.random.default_rng(4)
    made.info = {}
    made.rows["finish_reason"] = np.full(made.mask.shape[:2], "eos", object)
    verses = np.where(chance.random(made.mask.shape[:2]) < 0.7, 8, 16)
    banned = np.minimum(7 + chance.geometric(0.6, made.mask.shape[:2]), LENGTH)
    made.tokens["mask"] = np.arange(LENGTH) < (verses if form else banned)[..., None]
    made.settle()
    assert reading(end_forbidden, made, tmp_path).unhealthy != form


def test_variety_in_a_language_without_spaces(tmp_path: Path) -> None:
    """Each sign is a word there: the same texts with and without spaces lose the same variety."""
    signs = [chr(0x4E00 + i) for i in range(400)]
    seen = []
    for name, space in (("with", " "), ("without", "")):
        made, chance = healthy(), np.random.default_rng(5)
        for step, row in np.ndindex(*made.rows["response"].shape):
            few = 400 if step < HALF else 12
            made.rows["response"][step, row] = space.join(signs[i] for i in chance.integers(0, few, 30))
        found = reading(distinct_collapse, made, tmp_path / name)
        seen.append(found.seen)
        assert found.unhealthy and found.since == HALF
    assert seen[0] == seen[1]


@pytest.mark.parametrize(("few", "sick"), [(12, True), (24, False)])
def test_variety_that_is_missing_from_the_start_is_not_lost(few: int, sick: bool, tmp_path: Path) -> None:
    """Half of 25 different pairs is a large share, but few pairs; half of 400 is not."""
    made, chance = healthy(), np.random.default_rng(5)
    alike = not sick
    for step, row in np.ndindex(*made.rows["response"].shape):
        among = (4 if step < HALF else 3) if alike else (400 if step < HALF else few)
        made.rows["response"][step, row] = " ".join(str(i) for i in chance.integers(0, among, 15))
    found = reading(distinct_collapse, made, tmp_path)
    assert found.seen < 0.7 * found.words["before"] and found.unhealthy == sick


def test_answers_without_the_prompt_in_a_language_without_spaces(tmp_path: Path) -> None:
    seen = []
    for name, space in (("with", " "), ("without", "")):
        made, chance = healthy(), np.random.default_rng(5)
        for step, row in np.ndindex(*made.rows["response"].shape):
            begins = 20 * (1 + int(made.rows["group"][step, row])) if step < HALF else 0  # signs of the prompt's own
            made.rows["response"][step, row] = space.join(chr(0x4E00 + begins + i) for i in chance.integers(0, 20, 12))
        found = reading(template_collapse, made, tmp_path / name)
        assert found.unhealthy
        seen.append(found.seen)
    assert seen[0] == seen[1]


def test_a_prompt_that_comes_again_is_the_same_though_its_group_is_not(tmp_path: Path) -> None:
    """One response to each prompt, and groups that are numbered through the run: scores of the prompt alone."""
    made = healthy("ppo", siblings=1)
    prompts = made.rows["group"]
    made.rows["reward"] = made.rows["shaped_reward"] = np.sin(prompts) + 0.01 * chance_of(made)
    made.rows["group"] = np.arange(prompts.size).reshape(prompts.shape)
    assert reading(query_dominated, made, tmp_path / "again").unhealthy
    made.rows["reward"] = made.rows["shaped_reward"] = chance_of(made)
    assert not reading(query_dominated, made, tmp_path / "noise").unhealthy


def chance_of(made: Made) -> Array:
    return np.asarray(np.random.default_rng(3).normal(0, 1, made.mask.shape[:2]))
