import pytest

from cavesson.config import load
from cavesson.errors import UserError
from cavesson.findings.settings import filters
from cavesson.rollout.engines.settings import SamplingSettings


def test_the_defaults_sample_exactly_what_is_scored():
    settings = SamplingSettings()
    assert filters(settings.model_dump()) == [] and settings.temperature == 1


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_p": 0.99}, {"min_new_tokens": 1}])
def test_a_filter_is_named(settings):
    ((name, value),) = settings.items()
    assert filters(SamplingSettings(**settings).model_dump()) == [f"{name} = {value}"]


def test_temperature_is_no_filter():
    assert not filters(SamplingSettings(temperature=0.5).model_dump())
    assert filters(SamplingSettings(min_new_tokens=3).model_dump())


def test_the_longest_response():
    assert SamplingSettings(max_new_tokens=9).longest == 9
    assert SamplingSettings(random_length=(3, 20)).longest == 20


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--random_length", "[5, 3]"], "1 <= low <= high, not [5, 3]"),
        (["--random_length", "[0, 3]"], "1 <= low <= high, not [0, 3]"),
        (["--min_new_tokens", "33"], "min_new_tokens 33 is above the length limit 32"),
        (["--min_new_tokens", "9", "--random_length", "[2, 8]"], "min_new_tokens 9 is above the length limit 8"),
        (["--stop", '["a", ""]'], "an empty stop text would end every response at once"),
        (["--top_p", "0"], "top_p: input should be greater than 0"),
        (["--top_p", "1.5"], "top_p: input should be less than or equal to 1"),
        (["--temperature=-1"], "temperature: input should be greater than or equal to 0"),
        (["--max_new_tokens", "0"], "max_new_tokens: input should be greater than or equal to 1"),
    ],
)
def test_contradictions_are_refused(flags, part):
    with pytest.raises(UserError) as error:
        load(SamplingSettings, None, flags)
    assert part in str(error.value)
