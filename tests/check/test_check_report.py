"""What a check says in the terminal."""

import io

import pytest
from rich.console import Console

from cavesson.check.run import Report
from cavesson.check.short_run import First, Measured, Suggestion
from cavesson.check.show import show
from cavesson.findings.finding import Fine, Result, SkippedCheck

HEALTHY = "β of the KL penalty; about 0.0044 ends near 6 nats per response"
REASON = "it trains 4 steps without the KL penalty of the recipe; that has to be asked for"


def shown(width: int, *results: Result) -> str:
    out = io.StringIO()
    show(Console(file=out, width=width), Report("recipe.toml", "ppo", list(results)))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_healthy_ranges_and_reasons_are_whole_and_fit_the_terminal(width: int) -> None:
    text = shown(width, Fine("kl-coefficient-measured", 0.02, HEALTHY), SkippedCheck("short-run", REASON))
    words = text.replace("kl-coefficient-measured", "").replace("0.0200", "").replace("short-run", "").split()
    assert " ".join(words).count(HEALTHY) == 1
    assert " ".join(words).count(REASON) == 1
    assert max(map(len, text.splitlines())) <= width


def test_what_a_model_writes_commands_no_terminal() -> None:
    first = First(1, 1.0, (1, 1, 1), 0.5, 0.1, None, (("p\x1b[31m", "r\x9b31m\x07", 0.5),))
    measured = Measured("1 response", 0.1, 0, first, Suggestion(0.1, 6.0, 0.1, 0.2, 0.5, 1.0))
    report = Report("recipe.toml", "ppo", measured=measured)
    out = io.StringIO()
    show(Console(file=out), report)
    assert "p␛[31m" in out.getvalue() and "r⟨U+009B⟩31m␇" in out.getvalue()


def test_where_nothing_was_looked_at_nothing_is_said_to_be_right() -> None:
    assert "No problems found" in shown(80, Fine("device", "cpu", "device of the run"))
    assert "No problems found" not in shown(80, SkippedCheck("reward-examination", "the data has prompts only"))
