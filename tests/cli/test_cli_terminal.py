"""What a model or a file says commands no terminal: every command in a real one, over hostile data."""

import json
import re

import pytest
from cli_helpers import cavesson, in_terminal

from cavesson.models.tiny import tiny_model, tiny_tokenizer

EVIL = "\x1b]0;owned\x07 \x1b[2J \x9b31m \u202eoff \u2066 \x7f\r"
IN_TOML = json.dumps(EVIL).replace("\x7f", "\\u007f")
SIGNS = "␛]0;owned␇ ␛[2J ⟨U+009B⟩31m ⟨RLO⟩off ⟨LRI⟩ ␡␍"
ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
TALKER = "{% for turn in messages %}{{ turn.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with hostile data, and a run that was imported of it."""
    folder = tmp_path_factory.mktemp("hostile")
    rows = [
        {"step": step, "prompt": f"ask {EVIL}", "response": f"say {number} {EVIL}", "reward": float(number), EVIL: EVIL}
        for step in range(2)
        for number in range(4)
    ]
    pair = {"prompt": f"ask {EVIL}", "chosen": f"good {EVIL}", "rejected": f"bad {EVIL}"}
    for name, lines in (("rows", rows), ("pairs", [pair, pair]), ("broken", [*rows, {"prompt": EVIL}])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers = [{"prompt": row["prompt"], "response": row["response"]} for row in rows]
    (folder / "answers.json").write_text(json.dumps(answers))
    tiny_model().save_pretrained(folder / "other")
    tiny_tokenizer().save_pretrained(folder / "other")
    done = cavesson(folder, "import", "rows.jsonl", "run")
    assert done.code == 0, done.err
    return folder


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "run"),
        ("show", "run", "--step", "0", "--sample", "1"),
        ("sql", "run", "select prompt, extra from rows"),
        ("data", "show", "pairs.jsonl"),
        ("data", "duplicates", "pairs.jsonl"),
        ("score", "answers.json", "--rewards", f"{{use = 'lowercase', name = {IN_TOML}}}"),
        ("import", "broken.jsonl", "read", "--map", f"prompt={EVIL}"),
        ("sql", "run", f'select "{EVIL}" from rows'),
        ("compare", "tiny", "other", "--prompts", "pairs.jsonl", "--sampling.max_new_tokens", "4"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_what_others_wrote_is_shown_by_signs(folder, arguments):
    shown = in_terminal(folder, *arguments)
    assert not ACTING.search(shown), ascii(shown)
    assert "␛" in shown or r"\x1b" in shown, shown


def test_json_has_escapes_and_the_same_values(folder):
    shown = in_terminal(folder, "doctor", "run", "--json")
    piped = cavesson(folder, "doctor", "run", "--json").out
    assert not ACTING.search(shown) and shown == piped
    json.loads(shown)


FLAGS = ("--sampling.max_new_tokens", "1500", "--sampling.min_new_tokens", "1500", "--seed", "3")


@pytest.mark.slow
def test_generated_text_is_exact_in_files_and_pipes_and_safe_in_a_terminal(folder):
    written = cavesson(folder, "generate", "tiny", "--prompt", EVIL, "--out", "said.jsonl", *FLAGS)
    assert written.code == 0, written.err
    (row,) = map(json.loads, (folder / "said.jsonl").read_text().splitlines())
    assert row["prompt"] == EVIL and ACTING.search(row["response"])  # the tiny model says any byte
    cavesson(folder, "generate", "tiny", "--prompt", EVIL, *FLAGS)
    piped = (folder / ".out").read_bytes().decode()
    assert piped.startswith(EVIL + row["response"])
    shown = in_terminal(folder, "generate", "tiny", "--prompt", EVIL, *FLAGS)
    assert SIGNS in shown and not ACTING.search(shown)


@pytest.mark.slow
def test_a_conversation_commands_no_terminal(folder):
    (folder / "talk.jinja").write_text(TALKER)
    shown = in_terminal(folder, "generate", "tiny", "--chat", "--template", "talk.jinja", *FLAGS, typed="hi\n/quit\n")
    assert len(shown) > 1000 and "␛" in shown
    assert not ACTING.search(shown), ascii(shown)
