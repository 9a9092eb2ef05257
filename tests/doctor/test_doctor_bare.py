"""Faults in RL Logging Board lines, which have no settings, no metrics and no reasons why a response ended."""

import json
from pathlib import Path

import numpy as np
import pytest
from doctor_helpers import END, LENGTH, WORDS, Made, healthy, log_softmax
from sick import put, resample

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Diagnosis, diagnose
from cavesson.doctor.failures import not_excluded
from cavesson.doctor.rules import RULES
from cavesson.importers import import_run

TOKENS = {"logprob": "logprobs", "ref_logprob": "ref_logprobs", "value": "values", "token_reward": "token_rewards"}


UNNAMED = "¤"
"""Text of an end token that no well-known model has."""


def lines(made: Made, folder: Path, padded: bool = False, end: str = UNNAMED) -> Path:
    """Write the lines; ``padded``: as TRL has it, with the score on a padding token behind the end."""
    folder.mkdir(parents=True)
    with (folder / "rank_0.jsonl").open("w") as file:
        for step, masks in enumerate(made.mask):
            for row, mask in enumerate(masks):
                line = {name: made.rows[name][step, row] for name in ("prompt", "response")}
                line |= {"step": step, "reward": float(made.rows["reward"][step, row])}
                ids = made.tokens["token_id"][step, row][mask]
                line["response_tokens"] = [end if i == END else WORDS[i] for i in ids]
                for name, key in TOKENS.items():
                    line[key] = made.tokens[name][step, row][mask].tolist()
                if padded and ids[-1] == END:
                    line["response_tokens"].append("<pad>")
                    line["token_rewards"][-1] -= line["reward"]
                    line["token_rewards"].append(line["reward"])
                file.write(json.dumps(line) + "\n")
    return folder


def diagnosis(made: Made, folder: Path, padded: bool = False, end: str = UNNAMED) -> tuple[RunData, Diagnosis]:
    import_run(lines(made, folder / "lines", padded, end), folder / "run")
    data = RunData(cavesson.open(folder / "run"))
    return data, diagnose(data, RULES)


def causes(found: Diagnosis) -> list[str]:
    return [one.rule.name for one in found.causes]


def test_what_is_derived_from_a_healthy_run(tmp_path: Path) -> None:
    made = healthy()
    data, found = diagnosis(made, tmp_path)
    assert causes(found) == []
    ends = data.setting("eos_token_ids")
    assert np.array_equal(data.sample["token_id"] == ends[0], made.tokens["token_id"][made.mask] == END)
    assert data.setting("config.sampling.max_new_tokens") == LENGTH
    # A response whose last possible token is the end token is taken for one that was cut.
    length = made.mask.sum(-1).ravel()
    same = np.array(data.rows.texts("finish_reason")) == made.rows["finish_reason"].ravel()
    assert same[length < LENGTH].all()
    np.testing.assert_allclose(data.rows["kl_coef"][data.rows.step > 0], 0.05, rtol=0.02)


def test_the_penalty_of_short_responses(tmp_path: Path) -> None:
    """A third or more of their tokens have the score, which is not proportional to the log-ratio."""
    made = healthy()
    made.tokens["mask"] &= np.arange(LENGTH) < 3
    made.settle()
    data, _ = diagnosis(made, tmp_path)
    np.testing.assert_allclose(data.rows["kl_coef"][data.rows.step > 0], 0.05, rtol=0.02)


def test_whitening_counts_the_score_behind_the_end(tmp_path: Path) -> None:
    made = healthy()
    ended = (made.tokens["token_id"] == END).any(-1)
    for step, reward in enumerate(made.rows["reward"]):
        last = np.arange(LENGTH) == made.mask[step].sum(-1, keepdims=True) - 1
        inside = made.tokens["token_reward"][step] - np.where(last & ended[step][:, None], reward[:, None], 0.0)
        scale = np.concatenate([inside[made.mask[step]], reward[ended[step]]]).std()
        made.tokens["token_reward"][step] /= scale
        made.rows["reward"][step] = reward / scale
    import_run(lines(made, tmp_path / "lines", padded=True), tmp_path / "run")
    assert RunData(cavesson.open(tmp_path / "run")).setting("config.ppo.whiten_rewards") is True


def test_a_word_that_also_occurs_inside_is_no_end_token(tmp_path: Path) -> None:
    folder = lines(healthy(), tmp_path / "lines")
    (file,) = folder.iterdir()
    file.write_text(file.read_text().replace(json.dumps(UNNAMED), json.dumps(WORDS[1])))
    import_run(folder, tmp_path / "run")
    assert RunData(cavesson.open(tmp_path / "run")).setting("eos_token_ids") is None


@pytest.mark.parametrize("beta", [0.05, -0.05])
def test_the_score_may_be_behind_the_end(tmp_path: Path, beta: float) -> None:
    made = healthy()
    made.settle(beta=beta)
    _, found = diagnosis(made, tmp_path, padded=True)
    assert causes(found) == ([] if beta > 0 else ["penalty-wrong"])


def wrong_sign(made: Made) -> None:
    made.settle(beta=-0.05)


def early_reward(made: Made) -> None:
    """The score is four tokens before the end."""
    made.settle()
    last = made.mask.sum(-1) - 1
    for place in np.ndindex(*last.shape):
        early = max(0, last[place] - 4)
        rewards = made.tokens["token_reward"][place]
        score = made.rows["reward"][place]
        rewards[last[place]] -= score
        rewards[early] += score


def not_finite(made: Made) -> None:
    made.tokens["logprob"][20, 3, 0] = np.nan


def cut_more_and_more(made: Made) -> None:
    """20 %, then 80 % of the responses are cut, from the middle of the run."""
    for step in range(len(made.policy)):
        changed = made.policy[step].copy()
        changed[END] = np.log(0.077 if step < 12 else 0.011)
        made.policy[step] = log_softmax(changed)
    resample(made, lambda policy: policy)


def end_forbidden(made: Made, since: int = 0) -> None:
    for step in range(since, len(made.policy)):
        chance = np.random.default_rng(step)
        ids = chance.choice(len(made.policy[step]), made.mask.shape[1:], p=np.exp(made.policy[step]))
        other = 1 + (ids * 7 + np.arange(LENGTH)) % (len(WORDS) - 1)
        ids = np.where((ids == END) & (np.arange(LENGTH) < 18), other, ids)
        put(made, step, ids, made.policy[step])
    made.settle()


def hash_sign(made: Made) -> None:
    """`#` grows from 3 % to 55 % of the responses late in the run; with it, the reward is 0.9 σ higher."""
    chance = np.random.default_rng(3)
    steps, batch = made.mask.shape[:2]
    share = np.interp(np.arange(steps), [0.7 * steps, 0.85 * steps], [0.03, 0.55])
    has = chance.random((steps, batch)) < share[:, None]
    made.rows["response"] = np.where(has, made.rows["response"] + " #", made.rows["response"])
    made.rows["reward"] = made.rows["reward"] + 0.9 * made.rows["reward"].std() * has
    made.settle()


def test_a_word_that_is_worth_more_late_is_no_weakness_of_the_reward(tmp_path: Path) -> None:
    """When a policy converges, a word of what is asked for explains much of the little variance that is left."""
    made, chance = healthy(), np.random.default_rng(4)
    steps, batch = made.mask.shape[:2]
    late = (np.arange(steps) >= 0.75 * steps)[:, None]
    has = chance.random((steps, batch)) < np.where(late, 0.7, 0.12)
    made.rows["response"] = np.where(has, made.rows["response"] + " lovely", made.rows["response"])
    noise = chance.normal(0, 1, (steps, batch)) * np.where(late, 0.5, 1.0)
    # 0.21 is the variance of `has` late, and 0.8 that of the reward; over the run, this is worth less than half of it.
    made.rows["reward"] = noise + (0.3 * 0.8 / 0.21) ** 0.5 * has * late
    made.settle()
    _, found = diagnosis(made, tmp_path)
    assert "pattern-spreading" not in [one.rule.name for one in found.findings]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (wrong_sign, "penalty-wrong"),
        (early_reward, "reward-position"),
        (not_finite, "not-finite"),
        (cut_more_and_more, "truncated"),
        (end_forbidden, "end-forbidden"),
        (hash_sign, "pattern-spreading"),
    ],
)
def test_the_fault_is_named_first(fault, cause: str, tmp_path: Path) -> None:
    made = healthy()
    fault(made)
    _, found = diagnosis(made, tmp_path)
    assert causes(found)[:1] == [cause], causes(found)


def test_a_ban_on_ends_that_begins_in_the_middle_is_found_there(tmp_path: Path) -> None:
    """Over the whole run, fewer than half of the responses are cut."""
    made = healthy(steps=60)
    for step in range(40):
        made.policy[step][END] = np.log(0.077)
        made.policy[step] = log_softmax(made.policy[step])
    resample(made, lambda policy: policy)
    end_forbidden(made, since=40)
    assert (made.rows["finish_reason"] == "length").mean() < 0.5
    _, found = diagnosis(made, tmp_path)
    assert causes(found)[:1] == ["end-forbidden"], causes(found)
    assert found.findings[0].reading.since == 40


def test_a_little_more_reward_for_truncated_responses_by_chance_decides_nothing(tmp_path: Path) -> None:
    """Beside others of their step they get 0.12 standard deviations more, and the standard error is 0.07."""
    made = healthy()
    cut_more_and_more(made)
    made.rows["reward"] = np.random.default_rng(5).normal(size=made.rows["reward"].shape)
    for reward, is_cut in zip(made.rows["reward"], made.rows["finish_reason"] == "length", strict=True):
        reward[is_cut] -= reward[is_cut].mean() - reward[~is_cut].mean() - 0.25
    made.settle()
    _, found = diagnosis(made, tmp_path)
    assert "truncated" in [one.rule for one in found.skipped if one.undecided]
    assert "truncated" in [rule for one in not_excluded(found) for rule in one.failure.rules]


def test_filters_of_the_sampler_cannot_be_seen_and_this_is_said(tmp_path: Path) -> None:
    """top-k 8 at temperature 0.6: the log-probabilities are those of the policy, and the sampler's are not recorded."""
    made = healthy()

    def filtered(policy: np.ndarray) -> np.ndarray:
        return log_softmax(np.where(policy >= np.sort(policy)[-8], policy / 0.6, -np.inf))

    resample(made, filtered)
    _, found = diagnosis(made, tmp_path)
    (said,) = [one for one in not_excluded(found) if "filtered-sampling" in one.failure.rules]
    assert "tokens.sampler_logprob" in " ".join(said.lacking)


@pytest.mark.parametrize("end", [UNNAMED, "</s>", "<|IM_END|>"])
def test_an_end_token_that_does_not_end_the_response_is_known_by_its_name(end: str, tmp_path: Path) -> None:
    made = healthy()
    made.tokens["token_id"][..., 5] = END
    made.tokens["mask"] = np.ones_like(made.mask)
    made.settle()
    data, found = diagnosis(made, tmp_path, end=end)
    assert ("trained-behind-end" in causes(found)) == (end != UNNAMED)
    assert set(data.rows.texts("finish_reason")) <= {"length", None}
