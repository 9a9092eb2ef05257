"""What is exported of a run, its labels and its calls of tools is read back by `cavesson sft` and `cavesson dpo`."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from train_helpers import tiny_run
from typer.testing import CliRunner

import cavesson
from cavesson.cli import app
from cavesson.exporters.conversations import conversation
from cavesson.models.tiny import tiny_tokenizer
from cavesson.record import Recorder, begin_attempt, write_run
from cavesson.record.labels import Label, LabelFile
from cavesson.text.chat_marks import MARKS, ROLES

CHATML = """\
{%- for message in messages -%}
{{ "<|im_start|>" + message.role + "\\n" + (message.content or "") -}}
{%- if loop.first and tools -%}
{{ "\\n\\n# Tools\\n\\nThe functions are within <tools></tools>:\\n<tools>" -}}
{%- for tool in tools -%}{{ "\\n" + (tool | tojson) -}}{%- endfor -%}
{{ "\\n</tools>\\n\\nCall them." -}}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{ "\\n<tool_call>\\n" + (call.function | tojson) + "\\n</tool_call>" -}}
{%- endfor -%}
{{ "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\\n" -}}{%- endif -%}
"""
TOOL = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}
OFFER = (
    "# Tools\n\nThe functions are within <tools></tools>:\n<tools>\n" + json.dumps(TOOL) + "\n</tools>\n\nCall them."
)
PROMPT = (
    f"<|im_start|>system\nBe short.\n\n{OFFER}<|im_end|>\n<|im_start|>user\nWhat is 6 * 7?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
ASKED = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 6 * 7?"}]
GOOD = [
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [{"type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": 7}}}],
    },
    {"role": "tool", "name": "multiply", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
]
BAD = [{"role": "assistant", "content": "It is 41."}]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of four rollouts of one prompt; sample 1 calls a tool, and is better than sample 2."""
    folder: Path = tmp_path_factory.mktemp("exported") / "run"
    write_run(folder, {"algorithm": "grpo"})
    texts = ["It is 40.", f"Let me see.\n{CALL}<|im_end|>\n…42…It is 42.", "It is 41.", "It is 43."]
    turns = {
        "sample": [1, 1, 1],
        "role": ["assistant", "tool", "assistant"],
        "text": [f"Let me see.\n{CALL}", "42", "It is 42."],
        "name": [None, "multiply", None],
        "arguments": [None, '{"a": 6, "b": 7}', None],
    }
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step in range(2):
            rows = {"prompt": [PROMPT] * 4, "response": texts, "reward": [0.0, 1.0, 0.0, 0.0], "group": [0] * 4}
            recorder.rollouts(step, rows, {"token_id": [[0] * 9] * 4}, turns)
    labels = LabelFile(cavesson.open(folder))
    labels.add((1, 1), Label("over", 2, "Ann"))
    labels.add((1, 1), Label("over", 2, "Bob"))
    labels.add((0, 1), Label("over", 0, "Bob"))
    return folder


def exported(run: Path, out: Path, form: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["export", str(run), str(out), "--format", form])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_responses_become_conversations_that_sft_reads(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "sft.jsonl"
    lines = exported(run, out, "sft")
    assert len(lines) == 8
    assert lines[1] == {"messages": [*ASKED, *GOOD], "tools": [TOOL]}
    assert lines[2] == {"messages": [*ASKED, *BAD], "tools": [TOOL]}
    folder = tmp_path / "trained"
    tiny_run("sft", folder, data__path=str(out), data__template=CHATML, data__validation=0.0).run()
    assert (folder / "model").is_dir()


def test_a_template_writes_the_prompt_and_the_calls_again_as_they_were(run: Path, tmp_path: Path) -> None:
    line = exported(run, tmp_path / "sft.jsonl", "sft")[1]
    messages, tools = line["messages"], line["tools"]
    write = partial(tiny_tokenizer().apply_chat_template, tools=tools, chat_template=CHATML, tokenize=False)
    assert write(messages[:2], add_generation_prompt=True) == PROMPT
    said = (
        f"Let me see.\n{CALL}<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\nIt is 42.<|im_end|>\n"
    )
    assert write(messages) == PROMPT + said


def test_pairs_become_preferences_that_dpo_reads(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    lines = exported(run, out, "preference")
    worse = [{"role": "assistant", "content": "It is 40."}]
    assert lines == [
        {"prompt": ASKED, "chosen": GOOD, "rejected": worse, "tools": [TOOL]},
        {"prompt": ASKED, "chosen": GOOD, "rejected": BAD, "tools": [TOOL]},
    ]
    out.write_text(out.read_text() * 3)
    folder = tmp_path / "trained"
    tiny_run("dpo", folder, data__path=str(out), data__template=CHATML, data__validation=0.0).run()
    assert (folder / "model").is_dir()


def test_a_pair_of_different_prompts_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {"algorithm": "grpo"})
    with Recorder(tmp_path / "run", attempt=begin_attempt(tmp_path / "run", start_step=0)) as recorder:
        recorder.rollouts(
            0, {"prompt": ["a", "b"], "response": ["c", "d"], "reward": [0.0, 1.0]}, {"token_id": [[0]] * 2}
        )
    LabelFile(cavesson.open(tmp_path / "run")).add((0, 1), Label("over", 0, "Ann"))
    result = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "preference"])
    assert result.exit_code == 1 and "samples 1 and 0 are labelled as a pair, but answer different" in str(
        result.exception
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("prompt", "response", "wanted"),
    [
        ("Say hi.", " Hi", ([("user", "Say hi.")], [("assistant", " Hi")])),
        (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n",
            "…</think> Ho<|im_end|>",
            ([("user", "Hi")], [("assistant", "<think>\n…</think> Ho")]),
        ),
        ("<s>[INST] Hi [/INST]", "Ho</s>", ([("user", "Hi ")], [("assistant", "Ho")])),
        ("[user]\nHi\n\n", "[assistant]\nHo\n[tool]\n42", ([("user", "Hi")], [("assistant", "Ho"), ("tool", "42")])),
        (
            "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
            "Ho",
            ([("user", "Hi")], [("assistant", "Ho")]),
        ),
    ],
)
def test_marks_of_templates_tell_messages_apart(prompt: str, response: str, wanted: tuple[object, object]) -> None:
    found = conversation(prompt, response)
    assert ([tuple(one.values()) for one in found.prompt], [tuple(one.values()) for one in found.response]) == wanted


def test_a_call_that_is_not_json_stays_in_the_text() -> None:
    text = "<tool_call>\n{broken\n</tool_call>"
    assert conversation("Hi", text).response == [{"role": "assistant", "content": text}]
    calls = conversation("Hi", f"{CALL}\n{CALL}").response[0]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"a": 6, "b": 7}] * 2


def test_the_page_knows_the_same_marks() -> None:
    page = (Path(cavesson.__file__).parent / "board/web/src/maths/conversation.ts").read_text()
    for marks in MARKS:
        assert marks.opens in page and marks.closes in page and (marks.order or "") in page, marks
    assert len(re.findall(r"opens:\s+/", page)) == len(MARKS)
    assert all(f'"{role}"' in page for role in ROLES.values())
