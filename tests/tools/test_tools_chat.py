"""Conversations in a process of their own, against the library's generation of the same tokens."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from cavesson.config import load
from cavesson.errors import UserError
from cavesson.tools.chat import Talk, chat
from cavesson.tools.generate import load_policy
from cavesson.tools.settings import TalkSettings

FLAGS = ["--sampling.temperature", "0", "--sampling.max_new_tokens", "6", "--device", "cpu"]
PROGRAM = (
    "import sys\n"
    "from cavesson.config import load\n"
    "from cavesson.tools.chat import chat; from cavesson.tools.settings import TalkSettings\n"
    "print('ready', flush=True)\n"
    "chat(sys.argv[1], load(TalkSettings, None, sys.argv[2:]))\n"
    "print('left')"
)


def start(model: Path, *flags: str, stdin: int = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(model), *FLAGS, *flags]
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )


@torch.no_grad()
def answer(model: Path, text: str) -> str:
    """The likeliest six tokens after a text, one at a time, as far as the end token."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    ids = tokenizer(text)["input_ids"]
    said: list[int] = []
    while len(said) < 6 and said[-1:] != [0]:
        said.append(int(loaded(input_ids=torch.tensor([ids + said])).logits[0, -1].argmax()))
    return str(tokenizer.decode(said, skip_special_tokens=True))


@pytest.mark.slow
def test_a_conversation_is_remembered_until_it_is_reset(models):
    first = answer(models / "one", "s:Be brief.\nu:Hello\na:")
    second = answer(models / "one", f"s:Be brief.\nu:Hello\na:{first}\nu:And you?\na:")
    talk = start(models / "one", "--system", "Be brief.")
    out, _ = talk.communicate("Hello\n\nAnd you?\n/reset\nHello\n/quit\nnever read\n", timeout=200)
    assert talk.returncode == 0
    assert out == f"ready\n{first}\n{second}\n(forgotten)\n{first}\nleft\n"


@pytest.mark.slow
def test_control_c_and_the_end_of_input_leave(models):
    talk = start(models / "one")
    assert talk.stdin is not None and talk.stdout is not None and talk.stdout.readline() == "ready\n"
    print("/reset", file=talk.stdin, flush=True)
    assert talk.stdout.readline() == "(forgotten)\n"  # the model is there, and a line is waited for
    talk.send_signal(signal.SIGINT)
    out, err = talk.communicate(timeout=200)
    assert "left" in out and "Traceback" not in err and talk.returncode == 0


@pytest.mark.slow
def test_in_a_terminal(models):
    ours, theirs = pty.openpty()
    talk = start(models / "one", stdin=theirs)
    os.write(ours, b"Hello\n\x04")  # Ctrl-D
    out, err = talk.communicate(timeout=200)
    assert talk.returncode == 0, err
    assert "Ctrl-D exits" in out and answer(models / "one", "u:Hello\na:") in out and out.endswith("left\n")


def test_defaults_of_model_and_tokenizer_are_left_aside(models, tmp_path, capsys):
    for file in (models / "one").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    GenerationConfig(eos_token_id=0, repetition_penalty=9.0, do_sample=True, min_new_tokens=9).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(models / "one")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="b $A", special_tokens=[("b", 70)])
    tokenizer.save_pretrained(tmp_path)  # it begins every text with a token, which a template writes itself
    settings = load(TalkSettings, None, FLAGS)
    Talk(*load_policy(str(tmp_path), settings), settings).answer("Hello")
    assert capsys.readouterr().out.rstrip("\n") == answer(models / "one", "u:Hello\na:").rstrip("\n")


def test_sampled_answers_depend_on_the_seed_alone(models, capsys):
    said = []
    for seed in (0, 0, 1):
        settings = load(TalkSettings, None, ["--seed", str(seed), "--sampling.max_new_tokens", "20", "--device", "cpu"])
        torch.rand(seed + len(said))
        Talk(*load_policy(str(models / "one"), settings), settings).answer("Hello")
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]


def test_a_conversation_that_no_longer_fits_is_not_cut_silently(models, capsys):
    settings = load(TalkSettings, None, FLAGS)
    talk = Talk(*load_policy(str(models / "one"), settings), settings)
    talk.answer("a" * 2038)  # u:…\na: are 5 tokens more, and 6 are to come: one too many
    assert talk.messages == [] and "no longer fits into the model's 2048 tokens" in capsys.readouterr().out
    talk.answer("a" * 2037)
    assert len(talk.messages) == 2


def test_there_must_be_a_chat_template():
    with pytest.raises(UserError, match="no chat template"):
        chat("tiny", load(TalkSettings, None, FLAGS))
