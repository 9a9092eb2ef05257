"""What other people's logs have shown: fast hacks, falls from a peak, parts of rewards, conversations."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from doctor_helpers import LENGTH, Made, healthy, log_softmax, reading
from sick import put
from test_doctor_bare import causes, diagnosis

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.onset import onset
from cavesson.doctor.rules import RULES
from cavesson.doctor.rules.language import language_switch, scripts
from cavesson.doctor.rules.length import length_bias
from cavesson.doctor.rules.noise import reward_is_noise
from cavesson.doctor.rules.reward import reward_falls
from cavesson.doctor.rules.sampling import end_forbidden
from cavesson.doctor.rules.system import prompts_exhausted, rollouts_fail
from cavesson.doctor.rules.verifier import verifier_dead
from cavesson.doctor.series import Series
from cavesson.importers import import_run

BY_NAME = {rule.name: rule for rule in RULES}


def spread(made: Made, word: str, share: np.ndarray, worth: float, seed: int = 3) -> None:
    """Append a word to a share of the responses of each step, and reward those that have it."""
    chance = np.random.default_rng(seed)
    has = chance.random(made.mask.shape[:2]) < share[:, None]
    made.rows["response"] = np.where(has, made.rows["response"] + " " + word, made.rows["response"])
    made.rows["reward"] = chance.normal(0, 1, has.shape) + worth * has
    made.settle()


def test_a_word_that_is_in_nearly_all_responses_soon_after_it_appears(tmp_path: Path) -> None:
    """In 1 % of the responses before step 30, in 97 % from step 38 on: most steps do not tell what it is worth."""
    made = healthy(steps=90, batch=64)
    spread(made, "absolutely", np.interp(np.arange(90), [30, 38], [0.01, 0.97]), worth=1.1)
    _, found = diagnosis(made, tmp_path)
    assert "pattern-spreading" in causes(found), causes(found)


def test_many_words_that_spread_together_are_what_the_reward_asks_for(tmp_path: Path) -> None:
    """The reward is for any of six words, which spread alike: over the run, each seems to be worth as much as all."""
    made, chance = healthy(steps=60, batch=64), np.random.default_rng(3)
    share = np.interp(np.arange(60), [10, 50], [0.05, 0.4])[:, None]
    kind = np.zeros(made.mask.shape[:2])
    for word in ("lovely", "bright", "calm", "fresh", "clean", "sunny"):
        has = chance.random(kind.shape) < share
        made.rows["response"] = np.where(has, made.rows["response"] + " " + word, made.rows["response"])
        kind = np.maximum(kind, has)
    made.rows["reward"] = chance.normal(0, 0.3, kind.shape) + kind
    made.settle()
    _, found = diagnosis(made, tmp_path)
    assert "pattern-spreading" not in causes(found)


@pytest.mark.parametrize("depth", [0.0, 1.6])
def test_a_reward_that_rises_first_and_then_falls_below_its_start(depth: float, tmp_path: Path) -> None:
    """From 0 to 1.5 at step 30, and to −0.1 until step 45; the standard deviation of a step is 1."""
    made, steps = healthy(steps=60), np.arange(60)
    mean = np.interp(steps, [0, 30, 45, 60], [0, 1.5, 1.5 - depth, 1.5 - depth])
    made.rows["reward"] = np.random.default_rng(0).normal(0, 1, (60, 32)) + mean[:, None]
    found = reading(reward_falls, made, tmp_path)
    assert found.unhealthy == (depth > 0)
    if found.unhealthy:
        assert found.window is not None and 25 <= found.window[0] <= 32 <= found.since


def test_a_share_of_0_and_1_begins_where_it_stays_1() -> None:
    """One response a step, of which half fail; from step 101 on all of them."""
    values = np.where(np.arange(1, 201) > 100, 1.0, np.random.default_rng(0).random(200) < 0.45)
    found = onset(Series(np.arange(1, 201), values), rising=True)
    assert found.low <= 101 <= found.high and abs(found.step - 101) <= 3
    assert 0.35 < found.before < 0.55 and found.after == 1.0


@pytest.mark.parametrize(("earned", "is_sick"), [(0.4, True), (0.1, False)])
def test_one_of_two_verifiers_fails(earned: float, is_sick: bool, tmp_path: Path) -> None:
    """From step 14 on. What responses rarely earn can also be absent because the policy does something else."""
    made, chance = healthy(), np.random.default_rng(0)
    shape = made.mask.shape[:2]
    correct = (chance.random(shape) < earned) & (np.arange(24) < 14)[:, None]
    styled = chance.random(shape)
    parts = [
        [{"correct": float(a), "styled": float(b)} for a, b in zip(*one, strict=True)]
        for one in zip(correct, styled, strict=True)
    ]
    made.rows["reward_parts"] = np.array(parts, dtype=object)
    made.rows["reward"] = correct + styled
    found = reading(verifier_dead, made, tmp_path)
    assert found.unhealthy == is_sick
    if is_sick:
        assert (found.words["part"], found.words["value"], found.since) == (" (correct)", 0.0, 14)


def test_prompts_that_were_solved_for_a_while_are_not_exhausted_now(tmp_path: Path) -> None:
    made = healthy("grpo")
    solved = np.where((np.arange(24) >= 6) & (np.arange(24) < 16), 7, 1)
    reward = np.tile(np.linspace(0.0, 0.9, 4), (24, 8, 1))
    for step, count in enumerate(solved):
        reward[step, :count] = 1.0
    made.rows["reward"] = reward.reshape(24, 32)
    assert not reading(prompts_exhausted, made, tmp_path).unhealthy


def test_the_gap_in_length_begins_where_it_widens(tmp_path: Path) -> None:
    made, chance = healthy("grpo", steps=48), np.random.default_rng(1)
    reward = np.tile([0.0, 0.0, 1.0, 1.0], (48, 8))
    widens = np.interp(np.arange(48), [30, 36], [0, 8])[:, None]
    made.rows["reward"] = reward
    length = np.round(8 + chance.normal(0, 2, reward.shape) + widens * (reward == 0))
    made.tokens["mask"] = np.arange(LENGTH) < length[..., None]
    data = made.data(tmp_path)
    (found,) = diagnose(data, [BY_NAME[length_bias.name]]).findings
    low, high = found.reading.between
    assert 26 <= low <= high <= 38


def completions(folder: Path, weights: tuple[float, float], responses: list[str]) -> RunData:
    """TRL's table of completions, GRPO with two rewards: 12 steps of 8 groups of 4."""
    folder.mkdir()
    chance = np.random.default_rng(0)
    for step in range(12):
        parts = chance.random((8, 4, 2)).round(1)
        reward = parts @ weights
        advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, ddof=1, keepdims=True) + 1e-4)
        texts = [[{"role": "assistant", "content": responses[i % len(responses)]}] for i in range(32)]
        prompts = [[{"role": "user", "content": f"Question {step * 8 + i // 4}"}] for i in range(32)]
        flat = {"correct": parts[..., 0].ravel(), "styled": parts[..., 1].ravel(), "advantage": advantage.ravel()}
        table = pa.table({"step": [step] * 32, "prompt": prompts, "completion": texts, **flat})
        pq.write_table(table, folder / f"completions_{step:05d}.parquet")
    import_run(folder, folder / "run")
    return RunData(cavesson.open(folder / "run"))


def test_weights_that_the_table_of_completions_does_not_have(tmp_path: Path) -> None:
    """The plain sum of the parts is not what the advantages come from, and the table does not say what is."""
    data = completions(tmp_path / "log", (1.0, 0.2), ["yes", "no", "perhaps"])
    found = diagnose(data, [BY_NAME["group-advantages"]])
    assert found.findings == () and [one.undecided for one in found.skipped] == [True]


def test_empty_messages_are_empty_responses(tmp_path: Path) -> None:
    data = completions(tmp_path / "log", (1.0, 1.0), ["", "Paris", "It is Paris."])
    found = rollouts_fail.statistic(data)
    assert found.unhealthy and found.seen == pytest.approx(1 / 3, abs=0.02)


@pytest.mark.parametrize("end", [20, 40])
def test_a_reward_that_stops_rising_may_no_longer_depend_on_the_response(end: int, tmp_path: Path) -> None:
    """A verifier's verdicts, which no word predicts; no two responses are equal."""
    made, chance = healthy(steps=40), np.random.default_rng(0)
    passes = np.interp(np.arange(40), [0, end], [0.2, 0.7])[:, None]
    made.rows["reward"] = (chance.random((40, 32)) < passes).astype(float)
    made.rows["response"] = np.array([[f"{chance.random()}" for _ in range(32)] for _ in range(40)], dtype=object)
    found = reward_is_noise.statistic(made.data(tmp_path))
    assert (found is None or found.undecided is None) == (end == 40)


@pytest.mark.parametrize(("shortest", "is_sick"), [(8, False), (120, True)])
def test_a_few_short_responses_beside_a_fixed_form_are_not_a_ban(shortest: int, is_sick: bool, tmp_path: Path) -> None:
    """Of 768 responses, 600 are cut; the others have 13 tokens, a few of them 7, and one of them 9."""
    made = healthy()
    made.info["config"]["sampling"].pop("min_new_tokens", None)  # a setting of 0 would exclude it
    length = np.where(np.arange(768) < 600, 20, np.where(np.arange(768) < 768 - shortest, 13, 7))
    length[700] = 9
    length = length.reshape(24, 32)
    made.tokens["mask"] = np.arange(LENGTH) < length[..., None]
    made.rows["finish_reason"] = np.where(length == 20, "length", "eos").astype(object)
    assert reading(end_forbidden, made, tmp_path).unhealthy == is_sick


@pytest.mark.parametrize("since", [0, 10])
def test_a_sampler_that_becomes_more_certain_than_the_policy_does_not_filter(since: int, tmp_path: Path) -> None:
    """Settings of a sampler have an effect from the first step on; the sampler's log-probabilities are not recorded."""
    made = healthy()
    for step in range(since, 24):
        certain = log_softmax(np.where(made.policy[step] < np.sort(made.policy[step])[-8], -np.inf, made.policy[step]))
        ids = np.random.default_rng(step).choice(len(certain), made.mask.shape[1:], p=np.exp(certain))
        put(made, step, ids, certain)
    made.tokens["entropy"] = np.where(made.mask, -(np.exp(made.policy) * made.policy).sum(-1)[:, None, None], 0.0)
    del made.tokens["sampler_logprob"]
    data = made.data(tmp_path / "run")
    found = diagnose(data, [BY_NAME[name] for name in ("filtered-sampling", "sampler-mismatch")])
    assert causes(found) == ["filtered-sampling" if since == 0 else "sampler-mismatch"]
    if since:
        assert found.findings[0].reading.between[0] <= since <= found.findings[0].reading.between[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Größe, tiếng Việt 3.14", {"LATIN": 14}),
        ("Привет мир", {"CYRILLIC": 9}),
        ("東京タワーとひらがな", {"CJK": 10}),
        ("42 ± 1 🙂 \ud800", {}),
        (None, {}),
    ],
)
def test_the_script_of_each_letter(text: str | None, expected: dict[str, int]) -> None:
    assert scripts(text) == expected


def test_a_task_in_two_scripts_is_not_a_switch(tmp_path: Path) -> None:
    """A third of the prompts is answered in Chinese from the start, and later half of them."""
    made, chance = healthy(), np.random.default_rng(0)
    chinese = chance.random(made.mask.shape[:2]) < np.linspace(0.33, 0.5, 24)[:, None]
    made.rows["response"] = np.where(chinese, "房间很干净，早餐也不错，下次还会再来。", made.rows["response"])
    assert not reading(language_switch, made, tmp_path).unhealthy
