"""Text that others wrote is safe to print, and letters of every script stay as they are."""

import json
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavesson.record import Recorder, begin_attempt, write_run
from cavesson.text.visible import SIGNS, safe_json, visible, visible_line

ANY = st.text(st.characters() | st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"]))
TURNING = {"BN", "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def acts(character: str) -> bool:
    """Whether a terminal or a bidirectional layout takes it for a command."""
    category = unicodedata.category(character)
    return category in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(character) in TURNING - {"BN"}


@given(ANY)
def test_nothing_that_acts_is_left(text: str) -> None:
    assert not [one for one in visible_line(text) if acts(one)]
    assert not [one for one in visible(text) if acts(one) and one not in "\n\t"]
    visible(text).encode()
    assert visible(visible(text)) == visible(text)


@given(ANY)
def test_json_means_the_same_and_acts_on_nothing(text: str) -> None:
    written = safe_json(json.dumps({text: text}, ensure_ascii=False))
    assert json.loads(written) == {text: text}
    assert not [one for one in written if acts(one)]


@pytest.mark.parametrize(
    "text", ["مرحبا بالعالم", "می‌خواهم", "שלום עולם", "👩‍👩‍👧 e\u0302\u0301", "音乐 Đường\n\tphố", "हिन्दी", ""]
)
def test_letters_of_every_script_stay(text: str) -> None:
    assert visible(text) == text


def test_signs_name_what_they_stand_for() -> None:
    assert visible("\x1b[31m\r\x7f\x9b\u202ea\u2066\ud800\n") == "␛[31m␍␡⟨U+009B⟩⟨RLO⟩a⟨LRI⟩⟨U+D800⟩\n"
    assert visible_line("a\n\tb") == "a↵␉b"


JOINERS = {"\u200c", "\u200d"}
SEEN = {*"\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"}
"""Signs of Arabic, Syriac and Kaithi before numbers, which Unicode calls formats too."""
HIEROGLYPHS = set(map(chr, range(0x13430, 0x13440)))
BLANK = {*"\u115f\u1160\u3164\uffa0"}
"""Letters of Korean that are seen as nothing."""


def test_no_format_is_left_except_in_the_spelling_of_words() -> None:
    formats = {chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) == "Cf"}
    hidden = formats - JOINERS - SEEN - HIEROGLYPHS | BLANK
    assert {one for one in hidden if visible(one) == one} == set()
    assert visible("a\u00ad\U000e0041") == "a⟨U+00AD⟩⟨U+E0041⟩"


CLASS = r"\\\\u\{?([0-9a-f]{4,5})\}?(?:-\\\\u\{?([0-9a-f]{4,5}))?"
"""One character or a range in the regular expression of the page."""


def test_the_boards_page_shows_the_same_characters() -> None:
    page = Path(__file__).parents[2] / "src/cavesson/board/web/src/maths/text.ts"
    _, classes = page.read_text(encoding="utf-8").split("const ACTING = ")
    ranges = re.findall(CLASS, classes.split(");")[0])
    shown = {chr(code) for first, last in ranges for code in range(int(first, 16), int(last or first, 16) + 1)}
    signs = {chr(code) for code in SIGNS} - set(map(chr, range(0xD800, 0xE000))) - {"\n", "\t"}
    assert shown == signs


HOSTILE = "\x1b[31mred\x07\u202eturned\u2066"


@pytest.mark.slow
def test_no_name_in_a_record_acts_on_the_terminal(tmp_path: Path) -> None:
    run, source = tmp_path / f"run {HOSTILE}", tmp_path / f"{HOSTILE}.jsonl"
    write_run(run, {"algorithm": HOSTILE, "model": {"name": HOSTILE}, "source": HOSTILE})
    with Recorder(run, attempt=begin_attempt(run, start_step=0)) as recorder:
        for step in range(6):
            rows = {"sample": [0, 1], "prompt": [HOSTILE] * 2, "response": [HOSTILE] * 2, "reward": [0.0, float(step)]}
            parts = [{HOSTILE: 0.0}, {HOSTILE: float(step)}]
            recorder.rollouts(step, rows | {"reward_parts": parts, "finish_reason": [HOSTILE] * 2})
            recorder.metrics(step, {HOSTILE: 1.0})
    lines = [{"prompt": "a", "response": "b", HOSTILE: 1.0}, {"prompt": HOSTILE}, HOSTILE]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for command in (
        ["show", run], ["show", run, "--step", "5", "--sample", "1"], ["show", tmp_path / HOSTILE], ["doctor", run],
        ["doctor", run, "--json"], ["sql", run, "select * from rows"], ["sql", run, f"select '{HOSTILE}' {HOSTILE}"],
        ["import", source, tmp_path / f"new {HOSTILE}"],
        ["import", source, tmp_path / f"mapped {HOSTILE}", "--format", "jsonl", "--map", f"reward={HOSTILE}"],
        ["board", tmp_path / "none" / HOSTILE],
    ):  # fmt: skip
        done = subprocess.run([sys.executable, "-m", "cavesson", *map(str, command)], capture_output=True, timeout=120)
        said = (done.stdout + done.stderr).decode()
        assert said and "Traceback" not in said, command
        assert not [one for one in said if acts(one) and one not in "\n\t"], (command, said)
