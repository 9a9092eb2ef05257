"""Tokenizer, model and limits that do not fit together."""

import json
from pathlib import Path
from typing import Any

from check_helpers import found, run_of
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from cavesson.check.tokens import check_tokens
from cavesson.models.settings import StartSettings
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.plan.skeleton import config_of

# ChatML whose end of turn is a separate token.
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def checked(command: str, folder: Path, longest: int = 100, **changes: Any) -> dict[str, str]:
    return found(check_tokens(run_of(command, folder, **changes), tiny_tokenizer(), tiny_model().config, longest))


def chat_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|stop|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def config(vocabulary: int = 300, **changes: Any) -> PretrainedConfig:
    made = tiny_model().config
    made.vocab_size = vocabulary
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_what_belongs_together_is_fine(tmp_path: Path) -> None:
    assert checked("ppo", tmp_path) == {}


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path: Path) -> None:
    run = run_of("ppo", tmp_path)
    tokenizer = chat_tokenizer()
    assert len(tokenizer) == 260
    assert found(check_tokens(run, tokenizer, config(259), 100)) == {"vocabulary": "error"}
    assert found(check_tokens(run, tokenizer, config(260), 100)) == {}


def test_no_end_token(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    run = run_of("ppo", tmp_path)
    assert found(check_tokens(run, tokenizer, config(eos_token_id=None), 100)) == {"end-token": "error"}
    assert found(check_tokens(run, tokenizer, config(eos_token_id=0), 100)) == {}
    given = run_of("ppo", tmp_path, sampling__eos_token_ids=(7,))
    assert found(check_tokens(given, tokenizer, config(eos_token_id=None), 100)) == {}


def test_a_chat_turn_that_ends_with_another_token(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    stop = tokenizer.convert_tokens_to_ids("<|stop|>")
    chat = {"data__chat": True}
    run = run_of("ppo", tmp_path, **chat)
    assert found(check_tokens(run, tokenizer, config(), 100)) == {"end-token": "error"}
    assert found(check_tokens(run, tokenizer, config(eos_token_id=[0, stop]), 100)) == {}
    assert found(check_tokens(run_of("ppo", tmp_path), tokenizer, config(), 100)) == {}  # its data is plain text
    named = run_of("ppo", tmp_path, sampling__eos_token_ids=(stop,), **chat)
    assert found(check_tokens(named, tokenizer, config(), 100)) == {}


def test_the_generation_config_says_what_ends_a_response_as_when_sampling(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    stop = tokenizer.convert_tokens_to_ids("<|stop|>")
    model = tiny_model()
    model.generation_config.eos_token_id = [0, stop]
    model.save_pretrained(tmp_path / "chat")  # type: ignore[arg-type]
    assert model.config.eos_token_id != [0, stop]
    run = run_of("ppo", tmp_path, data__chat=True)
    seen = config_of(StartSettings(path=str(tmp_path / "chat")))
    seen.vocab_size = 300
    assert found(check_tokens(run, tokenizer, seen, 100)) == {}


def test_padding_that_is_the_unknown_token(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"unk_token": "<|pad|>"})
    run = run_of("ppo", tmp_path)
    assert found(check_tokens(run, tokenizer, config(), 100)) == {"padding": "warning"}


def test_conversations_are_read_as_chat(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "Hello"}]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = run_of("ppo", tmp_path, data__path=str(tmp_path / "rows.jsonl"))
    assert found(check_tokens(run, chat_tokenizer(), config(), 100)) == {"end-token": "error"}


def test_positions_that_rope_adds_count(tmp_path: Path) -> None:
    run = run_of("sft", tmp_path)
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    for changes, most in (({"rope_parameters": rope}, 8192), ({"max_position_embeddings": -1}, 10**6)):
        assert found(check_tokens(run, tiny_tokenizer(), config(**changes), most)) == {}
    assert found(check_tokens(run, tiny_tokenizer(), config(rope_parameters=rope), 8193)) == {"positions": "error"}


def test_more_tokens_than_positions(tmp_path: Path) -> None:
    assert checked("sft", tmp_path, longest=2049) == {"positions": "error"}
    assert checked("sft", tmp_path, longest=2048) == {}
