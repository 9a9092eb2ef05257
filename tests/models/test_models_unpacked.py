"""What a GGUF file contains is kept unpacked, and is what transformers reads from the file."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from models_helpers import save_gguf, small_llama
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from cavesson.errors import UserError
from cavesson.models import unpacked
from cavesson.models.load import load_causal, load_tokenizer

TEXT = "Der Zug fährt\nnicht. <|endoftext|>"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where models are kept, still empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cavesson" / "unpacked"


@pytest.fixture
def source(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """A folder with a GGUF file that has a model and a tokenizer."""
    (tmp_path / "source").mkdir()
    save_gguf(tmp_path / "source" / "a.gguf", small_llama(len(tokenizer) + 1), tokenizer)
    return str(tmp_path / "source")


def names(cache: Path) -> list[str]:
    return sorted(path.name.split("-")[-1] for path in cache.iterdir())


def same(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    """Whether all weights are the same, bit for bit and of the same dtype, and so are the settings and the source."""
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    weights = all(a[0] == b[0] and a[1].dtype == b[1].dtype and torch.equal(a[1], b[1]) for a, b in pairs)
    settings: list[dict[str, Any]] = [model.config.to_dict() for model in (one, other)]
    for config in settings:
        config.pop("architectures")  # transformers does not say it of a GGUF file
        config.pop("quantization_config", None)
    generation = [model.generation_config.to_dict() for model in (one, other)]
    return weights and settings[0] == settings[1] and generation[0] == generation[1]


def direct(source: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model as transformers reads it from the file."""
    config = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        source, gguf_file="a.gguf", dtype=dtype, quantization_config=config
    ).eval()


def unreadable(*_: object) -> None:
    raise AssertionError("the file is read again")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_is_that_of_the_file_and_the_file_is_read_once(cache, source, monkeypatch, dtype):
    expected = direct(source, getattr(torch, dtype))
    read, mapped = [], []
    reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    monkeypatch.setattr(gguf, "GGUFReader", lambda *given: read.append(given) or reader(*given))
    monkeypatch.setattr(gguf, "get_tensor_name_map", lambda *given: mapped.append(given) or name_map(*given))
    assert same(load_causal(source, dtype=dtype), expected)
    assert len(read) == len(mapped) == 1
    monkeypatch.setattr(gguf, "GGUFReader", unreadable)
    again = load_causal(source, dtype=dtype)
    assert same(again, expected) and again.name_or_path == source
    assert names(cache) == ["model", "model.lock"]


def test_the_tokenizer_is_that_of_the_file_and_the_file_is_read_once(cache, source, monkeypatch):
    expected = AutoTokenizer.from_pretrained(source, gguf_file="a.gguf")
    for reader in (gguf.GGUFReader, unreadable):
        monkeypatch.setattr(gguf, "GGUFReader", reader)
        tokenizer = load_tokenizer(source)
        assert tokenizer.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
        assert tokenizer(TEXT) == expected(TEXT) and tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
        assert tokenizer.special_tokens_map == expected.special_tokens_map
        assert tokenizer.chat_template == expected.chat_template
        assert tokenizer.padding_side == "left" and tokenizer.name_or_path == source
    assert names(cache) == ["tokenizer", "tokenizer.lock"]


def test_a_changed_file_is_another_model(cache, source):
    before = load_causal(source)
    file = Path(source, "a.gguf")
    times = file.stat()
    save_gguf(file, small_llama(before.config.vocab_size))
    assert file.stat().st_size != times.st_size  # it has no tokenizer any more
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = load_causal(source)
    assert same(after, direct(source)) and not same(after, before)


def test_the_same_file_elsewhere_is_unpacked_already(cache, source, tmp_path, monkeypatch):
    expected = load_causal(source)
    os.rename(source, tmp_path / "elsewhere")
    monkeypatch.setattr(gguf, "GGUFReader", unreadable)
    found = load_causal(str(tmp_path / "elsewhere"))
    assert found.name_or_path == str(tmp_path / "elsewhere")
    found.config.name_or_path = source
    assert same(found, expected)


PROGRAM = """
import sys, time, gguf, torch
from cavesson.models.load import load_causal
reader = gguf.GGUFReader
gguf.GGUFReader = lambda *given: print("read") or time.sleep(1) or reader(*given)
print("ready", flush=True)
sys.stdin.readline()
torch.save(load_causal(sys.argv[1]).state_dict(), sys.argv[2])
"""


@pytest.mark.slow
def test_of_several_processes_one_unpacks_the_file(cache, source, tmp_path):
    outs = [tmp_path / f"{number}.pt" for number in range(3)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([sys.executable, "-c", PROGRAM, source, out], **pipes) for out in outs]
    assert {process.stdout.readline() for process in started} == {"ready\n"}
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    printed = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0] * 3 and "".join(printed).split() == ["read"]
    expected = direct(source).state_dict()
    for out in outs:
        found = torch.load(out)
        assert list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_a_killed_process_has_left_is_replaced(cache, source, monkeypatch):
    def killed(self: PreTrainedModel, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedModel, "save_pretrained", killed)
        patched.setattr(unpacked.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            load_causal(source)
    assert names(cache) == ["model", "model.lock"]
    assert same(load_causal(source), direct(source))
    assert names(cache) == ["model", "model.lock"]


def test_without_room_nothing_is_kept(cache, source, monkeypatch):
    def full(self: PreTrainedModel, folder: Path) -> None:
        folder.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    assert same(load_causal(source), direct(source))
    assert names(cache) == ["model.lock"]


def test_without_a_cache_nothing_is_kept(source, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert same(load_causal(source), direct(source))
    assert load_tokenizer(source)(TEXT)["input_ids"]


def test_large_files_are_not_kept(cache, source, monkeypatch):
    monkeypatch.setattr(unpacked, "LARGEST", Path(source, "a.gguf").stat().st_size - 1)
    assert same(load_causal(source), direct(source))
    assert not cache.exists()


def test_a_model_that_lacks_weights_is_not_kept(cache, tmp_path):
    model = small_llama()
    save_gguf(tmp_path / "a.gguf", model, without="model.layers.0.mlp.up_proj.weight")
    first, second = load_causal(str(tmp_path)), load_causal(str(tmp_path))
    assert names(cache) == ["model.lock"]
    drawn = [each.state_dict()["model.layers.0.mlp.up_proj.weight"] for each in (first, second)]
    assert not torch.equal(*drawn)


def test_a_damaged_file_is_refused_every_time(cache, tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"This is not GGUF. " * 9)
    for _ in range(2):
        with pytest.raises(UserError, match="cannot load a model"):
            load_causal(str(tmp_path))
        with pytest.raises(UserError, match="cannot load a model"):
            load_tokenizer(str(tmp_path))
