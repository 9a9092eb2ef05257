import ast
import gc
import weakref

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from index_helpers import indexed, new_run, record

import cavesson.record
from cavesson.errors import UserError
from cavesson.index.filters import matches, names_in
from cavesson.index.prompt_ids import id_of


@pytest.fixture(scope="module")
def shot(tmp_path_factory):
    folder = new_run(tmp_path_factory.mktemp("filters") / "run")
    record(folder, range(8), batch=10)
    return indexed(folder)


def test_a_filter_means_what_it_says(shot):
    reward, step = shot.column("reward"), shot.column("step")
    length = shot.column("length")
    eos = np.array(shot.state.codes["finish_reason"])[shot.raw("finish_reason")] == "eos"
    of = shot.raw("sample") // 2
    for text, wanted in {
        "reward > 2": reward > 2,
        "2 < reward <= 4.5": (reward > 2) & (reward <= 4.5),
        'finish_reason == "eos"': eos,
        '"eos" != finish_reason': ~eos,
        'finish_reason in ["eos", "never"]': eos,
        "step in [1, 3, 99]": np.isin(step, [1, 3]),
        "step not in (1, 3)": ~np.isin(step, [1, 3]),
        "reward > 2 and length < 5 or not step >= 4": (reward > 2) & (length < 5) | ~(step >= 4),
        "abs(reward - 3) * 2 < length / 2": np.abs(reward - 3) * 2 < length / 2,
        'parts["good"] == 3': shot.column("part/good") == 3,
        'parts["bad/../"] <= -2': shot.column("part/bad/../") <= -2,
        "step * 1000000000 > 3000000000": step > 3,
        "reward is not None": np.ones(80, bool),
        "gap > 0": reward - np.float32(0.5) > 0,
        "1 in [1, 2]": np.ones(80, bool),
        "not 1 not in [1]": np.ones(80, bool),
        f'prompt_id == "{id_of("prompt 2")}"': of == 2,
        f'"{id_of("prompt 2")}" != prompt_id': of != 2,
        f'prompt_id in ["{id_of("prompt 2")}", "{id_of("prompt 0")}", "{id_of("no prompt")}"]': (of == 2) | (of == 0),
        f'prompt_id not in ["{id_of("prompt 2")}"] and step > 3': (of != 2) & (step > 3),
    }.items():
        assert matches(text, shot).tolist() == wanted.tolist(), text
        assert wanted.sum() > 0, text


def test_a_filter_keeps_nothing_that_only_garbage_collection_removes(shot):
    """Some of the rows with their numbers: 8 MB of a million, for each filter."""
    gc.disable()
    try:
        some = shot.only(np.arange(0, 80, 2))
        assert some.column("reward").tolist() == shot.column("reward")[::2].tolist()
        gone = weakref.ref(some)
        del some
        assert gone() is None
    finally:
        gc.enable()


def test_what_was_not_measured_matches_nothing(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, [0], ref_reward=np.array([None, 1.0, None, 2.0, 1.0, 1.0]))
    shot = indexed(folder)
    missing = [True, False, True, False, False, False]
    assert matches("ref_reward is None", shot).tolist() == missing
    for text in ("ref_reward > -100", "ref_reward != 77", "ref_reward not in [77]", "gap < 1000"):
        assert matches(text, shot).tolist() == [not x for x in missing], text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing > 2", "there is no column 'nothing'"),
        ("prompt > 2", "prompt is a text: compare it with one in quotes"),
        ('prompt_id == "12"', "the id of a prompt is 16 digits"),
        ('"0123456789abcdef" in prompt_id', "the id of a prompt is 16 digits"),
        ("reward", "must be a condition"),
        ("reward >", "cannot be read"),
        ("extra == 'x'", "a filter on extra needs the record of the run"),
        ("reward == 'x'", "ground_truth, reasons, extra, "),
        ("finish_reason > 'a'", "only be compared with == and !="),
        ("finish_reason > 2", "compare it with one in quotes"),
        ("__import__('os').system('true')", "cannot contain"),
        ("().__class__", "cannot contain"),
        ("[x for x in (1,)] == 1", "cannot contain"),
        ("(lambda: 1)() == 1", "cannot contain"),
        ("reward ** 9999999999 > 1", "operators are + - * /"),
        ("9" * 1500 + " > reward", "too large"),
        ("(" * 900 + "reward > 1" + ")" * 900, "cannot be read"),
        ("reward > 1" + " and reward > 1" * 500, "characters"),
        ("reward in 3", "needs a list"),
        ("reward is 3", "needs None"),
        ("reward and 1", "is not a condition"),
        ("abs(reward > 1) > 1", "is not a number"),
        ("True", "cannot contain"),
        ("1 < 2", ""),
        ("reward > 1j", "cannot contain"),
        ("reward\x00 > 1", "cannot be read"),
        ("f'{reward}' == 1", "cannot contain"),
    ],
)
def test_what_is_no_filter_is_one_plain_line(shot, text, says):
    try:
        result = matches(text, shot)
    except UserError as error:
        assert says and says in str(error) and "\n" not in str(error)
    else:
        assert text == "1 < 2" and result.all()


@settings(deadline=None)
@given(st.text(max_size=40) | st.from_regex(r"(reward|step|parts|[\[\]()\"'<>=!+*/ -]|and|or|not|in|is|None|\d){1,12}"))
@example("reward if reward else reward")
@example("reward > (yield)")
@example("reward := 3")
def test_no_text_does_anything_but_match_or_be_refused(shot, text):
    try:
        result = matches(text, shot)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert result.dtype == np.bool_ and result.shape == (shot.rows,)
        ast.parse(text.strip(), mode="eval")


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["reward", "step", "length", "kl_k1"]),
            st.sampled_from(["<", "<=", "==", "!="]),
            st.floats(-9, 9, width=32),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_conditions_joined_by_and_match_as_each_alone(shot, conditions):
    texts = [f"{column} {sign} {number!r}" for column, sign, number in conditions]
    together = matches(" and ".join(texts), shot)
    assert together.tolist() == np.all([matches(text, shot) for text in texts], axis=0).tolist()


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("step < 1,000", "step < 1000"),
        ("1,234,567 > step and step != 2", "1234567 > step and step != 2"),
        ("(step > −1,000)", "(step > -1000)"),
        ("abs(step - 1,000) < 1,000.5", "abs(step - 1000) < 1000.5"),
        ("step in [1,200] or step in (0,300)", "step in [1, 200] or step in (0, 300)"),
        ("reward > −0.5", "reward > -0.5"),
    ],
)
def test_numbers_may_be_written_as_the_board_shows_them(shot, written, plain):
    assert matches(written, shot).tolist() == matches(plain, shot).tolist()


@pytest.mark.parametrize("wrong", ["step < 1,00", "step < 12,3456", "step < 1,000,", "step < 1,0000"])
def test_other_commas_are_refused(shot, wrong):
    with pytest.raises(UserError):
        matches(wrong, shot)


def test_a_filter_says_which_columns_it_mentions():
    assert names_in('split == "eval" and (reward > 1,000 or not step in [1,200])') == {"split", "reward", "step"}
    assert names_in('finish_reason == "split"') == {"finish_reason"}
    assert names_in("split ==") == names_in("") == set()


RECORDED_TEXTS = {
    "prompt": ["What is 6 × 7?", "What is 6 × 7?", "What is 1 + 1?", "long " * 3000 + "end", "What is 1 + 1?", "?"],
    "response": ["42", "forty-two", "two", "the end", "2", ""],
    "ref_response": ["42", None, "2", "the end", None, "x"],
    "ground_truth": ["42", "42", "2", None, None, ""],
    "reward_reasons": [{"a": "right", "b": "too short"}, None, {"a": "wrong"}, {}, {"a": ""}, {"a": "right"}],
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A run of texts, of which step 1 was recorded twice, and its record."""
    folder = new_run(tmp_path_factory.mktemp("texts") / "run")
    record(folder, [0, 1], **RECORDED_TEXTS)
    record(folder, [1], **RECORDED_TEXTS)
    return indexed(folder), cavesson.record.open(folder)


@pytest.mark.parametrize("name", ["prompt", "response", "ref_response", "ground_truth", "reasons"])
@pytest.mark.parametrize("part", ["4", "two", "t", "end", "right\ntoo", "What is", "no such text", ""])
def test_a_filter_knows_every_text(texts, name, part):
    shot, run = texts

    def lines(reasons: dict[str, str] | None) -> str | None:
        return "\n".join(reasons.values()) if reasons else None

    own = [lines(one) for one in RECORDED_TEXTS["reward_reasons"]] if name == "reasons" else RECORDED_TEXTS[name]
    written = repr(part)
    wanted = {
        f"{written} in {name}": [one is not None and part in one for one in own],
        f"{written} not in {name}": [one is not None and part not in one for one in own],
        f"{name} == {written}": [one == part for one in own],
        f"{name} != {written}": [one is not None and one != part for one in own],
        f"{name} in [{written}, '42']": [one in (part, "42") for one in own],
        f"{name} is None": [one is None for one in own],
        f"{written} in {name} and sample > 1": [one is not None and part in one and i > 1 for i, one in enumerate(own)],
    }
    for text, found in wanted.items():
        there = np.ones(shot.rows, bool) if shot.alive is None else shot.alive
        assert matches(text, shot, run)[there].tolist() == 2 * found, text
        rows = np.flatnonzero(there)[3:8]
        assert matches(text, shot, run, rows).tolist() == (2 * found)[3:8], text
