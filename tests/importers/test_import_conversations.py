"""Prompts that were decoded without special tokens, and messages in JSON, are conversations; texts stay as recorded."""

import json
from pathlib import Path

import pytest
from import_helpers import lines, rows
from transformers import PreTrainedTokenizerFast

import cavesson
from cavesson.exporters.conversations import conversation
from cavesson.importers import import_run
from cavesson.models.tiny import tiny_tokenizer
from cavesson.text.chat_marks import asked

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
ASKED = [("system", "Be short."), ("user", "What is 6 * 7?\nThe user wants a number.")]
SAID = [
    ("assistant", f"Let me see.\n{CALL}"),
    ("user", "<tool_response>\n42\n</tool_response>\n<tool_response>\n{\"error\": \"late\"}\n</tool_response>"),
    ("assistant", "It is 42."),
]  # fmt: skip
TURNS = [
    ("assistant", None, None, f"Let me see.\n{CALL}", None),
    ("tool", "multiply", '{"a": 6, "b": 7}', "42", None),
    ("tool", None, None, '{"error": "late"}', "late"),
    ("assistant", None, None, "It is 42.", None),
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One with ChatML's special tokens."""
    made = tiny_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return made


def chatml(messages: list[tuple[str, str]]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)


def decoded(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    """A text as verl writes it."""
    return tokenizer.batch_decode([tokenizer(text)["input_ids"]], skip_special_tokens=True)[0]


def turns(run: Path) -> list[tuple]:
    names = ["role", "name", "arguments", "text", "error"]
    return [tuple(line[name] for name in names) for line in cavesson.open(run).arrow("turns").to_pylist()]


def test_a_prompt_and_a_response_of_verl_are_conversations(tmp_path, tokenizer):
    prompt = decoded(tokenizer, chatml(ASKED) + "<|im_start|>assistant\n")
    response = decoded(tokenizer, chatml(SAID).removeprefix("<|im_start|>assistant\n"))
    assert prompt.startswith("system\nBe short.\nuser\n") and "<|" not in prompt + response
    lines(tmp_path / "log" / "3.jsonl", {"input": prompt, "output": response, "gts": "42", "score": 1.0, "step": 3})
    import_run(tmp_path / "log", tmp_path / "run")
    assert rows(tmp_path / "run", "prompt", "response") == [(prompt, response)]
    assert turns(tmp_path / "run") == TURNS
    assert rows(tmp_path / "run", "turns", "calls", "call_errors") == [(2, 2, 1)]
    found = conversation(prompt, response)
    assert [(one["role"], one["content"]) for one in found.prompt] == ASKED
    assert asked(prompt) == ASKED[1][1]


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("areal", {"prompt": "p", "completion": "…", "reward": 1.0, "head_version": 1, "tail_version": 1}),
        ("skyrl", {"input_prompt": "p", "output_response": "…", "score": 1.0}),
        ("trl", {"step": 1, "prompt": "p", "completion": "…", "f": 1.0, "advantage": 0.0}),
        ("plain", {"prompt": "p", "answer": 1, "response": "…", "reward": 1.0, "group": 1, "token_id": [1]}),
    ],
)
def test_results_of_tools_in_a_text_are_turns(tmp_path, name, record):
    """With special tokens, as SkyRL writes them, or without."""
    key = next(key for key, value in record.items() if value == "…")
    marked = chatml(SAID).removeprefix("<|im_start|>assistant\n")
    plain = marked.replace("<|im_start|>", "").replace("<|im_end|>", "")
    for place, text in enumerate((marked, plain)):
        lines(tmp_path / f"log{place}" / "completions.jsonl", record | {key: text})
        import_run(tmp_path / f"log{place}", tmp_path / f"run{place}", name)
        assert turns(tmp_path / f"run{place}") == TURNS
        assert rows(tmp_path / f"run{place}", "response") == [(text,)]


@pytest.mark.parametrize(
    "said",
    [
        "I say\nuser\nNo.\nassistant\nYes.",
        "<|im_start|>user\nMore<|im_end|>",
        "a<|im_end|>\n<|im_start|>assistant\nb<|im_end|>",
        "a\ntool\nb",
    ],
)
def test_marks_that_the_policy_may_have_written_are_no_turns(tmp_path, said):
    lines(tmp_path / "1.jsonl", {"input": "p", "output": said, "gts": None, "score": 1.0, "step": 1})
    import_run(tmp_path / "1.jsonl", tmp_path / "run")
    assert turns(tmp_path / "run") == []


def test_messages_in_json_are_conversations(tmp_path):
    prompt = json.dumps([{"role": role, "content": text} for role, text in ASKED])
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": 7}}}
    answers = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ]
    record = {"step": 1, "prompt": prompt, "completion": json.dumps(answers), "f": 1.0, "advantage": 0.0}
    lines(tmp_path / "completions.jsonl", record)
    import_run(tmp_path / "completions.jsonl", tmp_path / "run")
    assert rows(tmp_path / "run", "prompt", "response") == [(prompt, json.dumps(answers))]
    assert [line[:4] for line in turns(tmp_path / "run")[1:]] == [
        ("tool", "multiply", '{"a": 6, "b": 7}', "42"),
        ("assistant", None, None, "It is 42."),
    ]
    found = conversation(prompt, json.dumps(answers))
    assert (found.prompt, found.response) == (json.loads(prompt), answers)
