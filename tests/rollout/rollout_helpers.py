"""Chat templates with tokenizers that know their special tokens, and conversations with calls of tools."""

import json
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase
from transformers import PreTrainedTokenizerFast as FastTokenizer

from cavesson.data.chat import Chat
from cavesson.rollout.engines.responses import Responses, Turns
from cavesson.types import Batch

TEMPLATES = Path(__file__).with_name("templates")
"""In the structure of public ones."""
_SPECIAL = re.compile(r"<\|[^|>]+\|>|<｜[^｜]+｜>|\[/?[A-Z]+(?:_[A-Z]+)*\]|<(?:start|end)_of_turn>|\[gMASK\]|<sop>")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What Qwen's tokenizers, and with other groups of digits Llama 3's, take for words."""
_ORDINARY = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that are not special."""
END = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>",
    "smollm3": "<|im_end|>",
    "hermes": "<|im_end|>",
    "chatml": "<|im_end|>",
    "internlm": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "granite": "<|end_of_text|>",
    "command_r": "<|END_OF_TURN_TOKEN|>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "mistral_v3": "</s>",
    "mistral_v7": "</s>",
    "mistral_v13": "</s>",
    "gptoss": "<|call|>",
    "phi4": "<|end|>",
    "phi3_5": "<|end|>",
    "gemma3": "<end_of_turn>",
    "glm4moe": "",
}
"""By what a turn ends; GLM ends it by the header of the next one."""


def template(name: str) -> str:
    """One of ours, or one that TRL ships as the models' authors wrote it."""
    ours = TEMPLATES / f"{name}.jinja"
    if ours.exists():
        return ours.read_text()
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


@cache
def tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Bytes, some pairs of them, and the template's special tokens."""
    source = template(name)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [
        ("t", "h"),
        ("th", "e"),
        ("Ġ", "the"),
        ("o", "n"),
        ("Ċ", "Ċ"),
        ("a", "s"),
        ('"', "}"),
        ("}", "}"),
        ("u", "s"),
    ]
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, *("".join(pair) for pair in pairs)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    eos = "</s>" if END[name] in ("<|end|>", "<|call|>", "") else END[name]
    special = sorted({*_SPECIAL.findall(source), "<s>", "</s>", "<pad>", "<|user|>", "<|system|>", eos})
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.add_tokens([AddedToken(token, special=False) for token in _ORDINARY if token in source])
    return FastTokenizer(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token=eos,
        pad_token="<pad>",
        chat_template=source,
    )


def chat(name: str, **options: object) -> Chat:
    """A renderer with one of the templates."""
    return Chat(tokenizer(name), options=options)


_NUMBER = {"type": "integer", "description": "A number."}
TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {"type": "object", "properties": {"a": _NUMBER, "b": _NUMBER}, "required": ["a", "b"]},
    },
}
"""A tool as chat templates take it."""

TOOLS_AND_REPLIES = ["qwen2_5", "smollm3", "hermes", "internlm", "llama3_1", "llama3_2", "granite", "command_r"]
TOOLS_AND_REPLIES += ["mistral_v13", "phi4", "glm4moe"]
TOOLS = [*TOOLS_AND_REPLIES, "mistral_v3", "mistral_v7", "gptoss"]
REPLIES = [*TOOLS_AND_REPLIES, "mistral_v3", "mistral_v7", "chatml", "phi3_5", "gemma3"]
PARALLEL = [name for name in TOOLS if name not in ("llama3_1", "llama3_2", "gptoss")]
AS_TEXT = ["internlm", "deepseekv3"]
"""Templates that need the arguments of a call as JSON text."""
ASK = {"role": "user", "content": "What is 6 * 7?"}


def call(number: int, name: str = "multiply") -> dict:
    function = {"name": name, "arguments": {"a": number, "b": 7}}
    return {"id": f"abcdef{number:03d}", "type": "function", "function": function}


def result(number: int, content: str, name: str = "multiply") -> dict:
    return {"role": "tool", "name": name, "tool_call_id": f"abcdef{number:03d}", "content": content}


def answer(content: str) -> dict:
    return {"role": "assistant", "content": content}


def calls(*made: dict) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": [*made]}


def rendered(name: str, messages: list[dict], tools: list[dict], opens: bool) -> str:
    """What `apply_chat_template` writes; no text in the messages looks like a token of the template."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        if name == "glm4moe" and message["content"] is None:
            message["content"] = ""
        for made in message.get("tool_calls", ()) if name in AS_TEXT else ():
            made["function"]["arguments"] = json.dumps(made["function"]["arguments"])
    return str(
        tokenizer(name).apply_chat_template(messages, tools=tools or None, add_generation_prompt=opens, tokenize=False)
    )


def encoded(name: str, text: str) -> list[int]:
    return list(tokenizer(name)(text, add_special_tokens=False)["input_ids"])


class Script:
    """An engine that writes, in each row, one text after the other; each ends with the end token unless it is cut."""

    def __init__(self, encode: Any, texts: dict[int, list[str]]) -> None:
        self.encode, self.texts = encode, texts
        self.eos = torch.tensor([encode.eos_token_id])
        self.turns: dict[int, int] = {}
        self.rounds: list[list[int]] = []
        self.seen: dict[int, list[list[int]]] = {}

    def sample(
        self,
        prompts: Batch,
        step: int,
        rows: Sequence[int],
        temperature: float | None = None,
        turns: Turns | None = None,
    ) -> Responses:
        assert turns is not None
        self.rounds.append(list(rows))
        found, reasons = [], []
        for place, row in enumerate(rows):
            read = prompts["prompt_ids"][place][prompts["prompt_mask"][place] > 0].tolist()
            self.seen.setdefault(row, []).append(read)
            text = self.texts[row][self.turns.get(row, 0)]
            self.turns[row] = self.turns.get(row, 0) + 1
            ids = [*self.encode(text)["input_ids"], self.encode.eos_token_id]
            room = turns.room[place]
            reasons.append("eos" if len(ids) <= room else "length")
            found.append(ids[:room])
        width = max(map(len, found))
        mask = torch.tensor([[1.0] * len(ids) + [0.0] * (width - len(ids)) for ids in found])
        padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in found])
        return Responses(padded, mask, -0.5 * mask, reasons, torch.full_like(padded, step))

    def sampling(self) -> AbstractContextManager[None]:
        return nullcontext()

    def update_weights(self, step: int) -> None: ...

    def sleep(self) -> None: ...

    def close(self) -> None: ...
