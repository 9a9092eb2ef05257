import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from text_helpers import CHATML, byte_pairs

from cavesson.errors import UserError
from cavesson.models.tiny import tiny_model
from cavesson.tools.show_recipe import show_recipe

PAIR = {"prompt": "a", "chosen": " b", "rejected": " c"}
SAID = {"prompt": "a", "response": " b"}
REWARDS = '[[rewards]]\nuse = "lowercase"\n'


def recipe(folder: Path, row: dict[str, Any], text: str = "") -> Path:
    """A recipe for three rows of which the second is this one; the text stands before its table of the data."""
    rows = [{**row, "prompt": "first"}, row, {**row, "prompt": "third"}]
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    file = folder / "recipe.toml"
    file.write_text(f'run = "runs/a"\n{text}\n[data]\npath = "{folder / "a.jsonl"}"\n', encoding="utf-8")
    return file


def shown(file: Path, *flags: str) -> str:
    out = io.StringIO()
    show_recipe(file, flags, Console(file=out, width=100))
    return out.getvalue()


def fact(text: str, name: str) -> str:
    (found,) = re.findall(rf"^{name}  +(.*?) *$", text, flags=re.MULTILINE)
    return found


@pytest.mark.parametrize(
    ("row", "text", "flags", "commands", "rows"),
    [
        (SAID, "", (), "sft", "3 (demonstrations)"),
        (PAIR, "", (), "reward-model, dpo", "3 (pairs)"),
        (PAIR, "[dpo]\nbeta = 0.2", (), "dpo", "3 (pairs)"),
        (PAIR, "[sft]\nneftune_alpha = 5", (), "sft", "3 (demonstrations)"),
        (PAIR, "", ("--kind", "demonstrations"), "sft", "3 (demonstrations)"),
        (PAIR, "", ("--sft.neftune_alpha", "5"), "sft", "3 (demonstrations)"),
        ({**SAID, "label": False}, "", (), "kto", "3 (labelled responses)"),
        ({**SAID, "label": False}, "[kto]\nbeta = 0.2", (), "kto", "3 (labelled responses)"),
        (PAIR, "[kto]\nbeta = 0.2", (), "kto", "6 (labelled responses)"),
        ({"prompt": "a"}, "", (), "ppo, grpo, rloo, distill, raft", "3 (prompts)"),
        (SAID, REWARDS, (), "ppo, grpo, rloo, distill, raft", "3 (prompts)"),
        (PAIR, f"{REWARDS}[raft]\nk = 2", (), "raft", "3 (prompts)"),
    ],
)
def test_rows_are_read_as_the_commands_of_the_recipe_read_them(tmp_path, row, text, flags, commands, rows):
    printed = shown(recipe(tmp_path, row, text), *flags)
    assert fact(printed, "recipe of") == commands
    assert fact(printed, "rows") == rows


def test_the_row_is_rendered_with_tokenizer_and_settings_of_the_recipe(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    tokenizer = byte_pairs()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path / "model")
    file = recipe(tmp_path, {"prompt": "the", "response": " old"}, f'model.path = "{tmp_path / "model"}"\n')
    file.write_text(file.read_text() + "chat = true\nvalidation = 0.34\n")
    printed = shown(file, "--row", "2", "--data.system", "the bridge")
    assert fact(printed, "rows") == "2 (demonstrations), and 1 held out"
    text = "".join(re.findall(r"│ \w* +│ (.*?) *│\n", printed)).replace("│", "")
    turns = [("system", "the bridge"), ("user", "the"), ("assistant", " old")]
    assert text == "".join(f"<|im_start|>{role}↵{said}<|im_end|>↵" for role, said in turns)
    learned = re.search(r"│ learned │ (.*?) *│\n", printed)
    assert learned is not None and learned[1] == " old│<|im_end|>│"
    short = " ".join(shown(file, "--data.max_length", "3").split())
    assert "dropped: no token of a response is within data.max_length = 3" in short


@pytest.mark.parametrize(
    ("row", "text", "flags", "part"),
    [
        (SAID, "", ("--row", "4"), "there is no row 4 among 3 demonstrations"),
        (SAID, "", ("--row", "0"), "row: input should be greater than or equal to 1"),
        (
            SAID,
            REWARDS,
            ("--kind", "pairs"),
            "ppo and grpo and rloo and distill and raft would read prompts, and not pairs",
        ),
        (
            {"prompt": "a"},
            "epochs = 2",
            (),
            "sft and reward-model and dpo and kto would read demonstrations or pairs or labelled, and not prompts",
        ),
        (SAID, "", ("--data.max_lenth", "9"), "unknown setting 'data.max_lenth'; did you mean 'data.max_length'"),
        (PAIR, "[dpo]\nbetta = 1", (), "unknown setting 'dpo.betta'; did you mean 'dpo.beta'"),
        (SAID, f"{REWARDS}[sampling]\nstopp = 1", (), "unknown setting 'sampling.stopp'; did you mean 'sampling.stop'"),
    ],
)
def test_mistakes_are_explained(tmp_path, row, text, flags, part):
    with pytest.raises(UserError) as error:
        shown(recipe(tmp_path, row, text), *flags)
    assert part in str(error.value)


def test_a_recipe_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="there is no such recipe"):
        shown(tmp_path / "b.toml")
