"""A run of episodes: some call tools, some calls fail, and some rollouts have no turns."""

from pathlib import Path
from typing import Any

from browser_helpers import Vocabulary

from cavesson.record import Recorder, begin_attempt, write_run

PROMPT = (
    "<|im_start|>system\nUse the tools.<|im_end|>\n<|im_start|>user\nWhat is 6 * 7?<|im_end|>\n<|im_start|>assistant\n"
)
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
RESULT = "<tool_response>\n42\n</tool_response>"
ANSWER = "The answer is **42**, as $6 \\cdot 7 = 42$.\n\n```python\nprint(6 * 7)\n```"
THOUGHT = "<think>\nI should multiply.\n</think>\n\n"


def _turn(sample: int, role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"sample": sample, "role": role, "text": text} | more


def _call(sample: int, name: str, text: str, **more: Any) -> dict[str, Any]:
    return _turn(sample, "tool", text, name=name, arguments='{"a": 6, "b": 7}', **more)


EPISODES: list[list[dict[str, Any]]] = [
    [
        _turn(0, "assistant", THOUGHT + CALL % ("multiply", '{"a": 6, "b": 7}')),
        _call(0, "multiply", "42", seconds=0.25),
        _turn(0, "assistant", ANSWER, reward=1.0),
    ],
    [
        _turn(1, "assistant", CALL % ("search", '{"query": "6 * 7"}')),
        _call(1, "search", '{"error": "timed out"}', seconds=2.0, error="timed out after 2 seconds"),
        _turn(1, "assistant", CALL % ("search", '{"query": "7 * 6"}')),
        _call(1, "search", "forty-two", seconds=0.5),
        _turn(1, "assistant", "Forty-two, I think."),
        _turn(1, "user", "Are you sure?"),
        _turn(1, "assistant", "Yes."),
    ],
    [
        _turn(2, "assistant", CALL % ("search", '{"query": "6 * 7"}')),
        _call(2, "search", "forty-two", seconds=0.5),
        _turn(2, "assistant", CALL % ("multiply", '{"a": 6}')),
        _call(2, "multiply", '{"error": "b is missing"}', error="b is missing"),
        _turn(2, "assistant", "I cannot tell."),
    ],
    [_turn(3, "assistant", "42"), _turn(3, "user", "Good.")],
    [],
]
"""By sample: its turns. The last has none."""
REWARDS = [1.0, 0.5, 0.0, 0.75, 0.25]
SOURCES = {"assistant": "sampled", "tool": "tool", "user": "user"}


def record_episodes(folder: Path, steps: int = 2) -> Path:
    """Record the same episodes at every step, with a token of the template before each turn but the first."""
    write_run(folder, {"algorithm": "grpo"})
    vocabulary = Vocabulary()
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step in range(steps):
            rows, tokens, turns = _step(vocabulary)
            recorder.rollouts(step, rows, tokens, turns)
            recorder.metrics(step, {"episode/turns": 2.0 + step, **METRICS})
    vocabulary.write(folder)
    return folder


METRICS = {
    "tool/search/calls": 0.6, "tool/search/errors": 0.25, "tool/search/seconds": 0.9,
    "tool/multiply/calls": 0.4, "tool/multiply/errors": 0.5, "tool/multiply/seconds": 0.25,
    "finish/eos": 0.75, "finish/turns": 0.25,
}  # fmt: skip


def _step(vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    ids, sources, learned, lines, responses = [], [], [], [], []
    for turns in EPISODES:
        own: list[tuple[int, str]] = []
        said = ""
        for turn in turns or [_turn(4, "assistant", "No turns here.")]:
            if own:
                own += [(one, "template") for one in vocabulary.ids("<|im_end|>")]
            first, pieces = len(own), vocabulary.ids(turn["text"])
            own += [(one, SOURCES[turn["role"]]) for one in pieces]
            said += ("<|im_end|>" if said else "") + turn["text"]
            lines += [turn | {"first_token": first, "tokens": len(pieces)}] if turns else []
        ids.append([one for one, _ in own])
        sources.append([source for _, source in own])
        learned.append([source == "sampled" for source in sources[-1]])
        responses.append(said)
    names = list(dict.fromkeys(name for line in lines for name in line))
    rows = {"prompt": [PROMPT] * len(ids), "response": responses, "reward": REWARDS, "group": [0] * len(ids)}
    tokens = {"token_id": ids, "source": sources, "learned": learned}
    tokens["logprob"] = [[-0.25 - 0.01 * place for place in range(len(row))] for row in ids]
    return rows, tokens, {name: [line.get(name) for line in lines] for name in names}
