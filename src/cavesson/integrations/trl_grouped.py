"""Record the tokens of GRPO and RLOO by reading the return values of the trainer's own methods.

Methods of the trainer are wrapped. One of them generates; when it returns, everything is known except the entropies
and, if policy and sampler are the same, the policy's log-probabilities, which the trainer computes with the loss.
Another one samples turns: what it returns says which tokens were sampled, whatever the mask of the loss says.
"""

from typing import Any

import numpy as np

from cavesson.importers.fields import is_messages
from cavesson.importers.sampled import was_sampled
from cavesson.importers.turns import Turn, sources_of, spans_of, turns_of
from cavesson.integrations.drawn import Drawn
from cavesson.integrations.tensors import as_array, without_padding
from cavesson.integrations.timed_tools import Times, timed_tools
from cavesson.integrations.trl_callback import RecorderCallback, reward_rows, text_rows, truths_of
from cavesson.record.precision import Array
from cavesson.record.schema import SOURCE_CODES

PENALTIES = {
    "GRPOConfig": {"place": "loss", "estimator": "k3"},
    "RLOOConfig": {"place": "reward", "estimator": "k1"},
}
"""Where each trainer applies its KL penalty and how it estimates the KL, by the class of its settings."""
LINE = "cavesson_line"
"""Goes with the batch through the trainer's shuffling and splitting, and says which rollout each line of it is."""


def watch(trainer: Any, callback: RecorderCallback) -> None:
    """Wrap the trainer's methods so that ``callback`` receives the rollouts at the end of each step."""
    watcher = _Watcher(trainer, callback)
    trainer._generate_and_score_completions = watcher.generate
    trainer._calculate_rewards = watcher.rewards
    trainer._get_per_token_logps_and_entropies = watcher.score
    trainer._compute_loss = watcher.loss
    if hasattr(trainer, "_tool_call_loop"):
        trainer._tool_call_loop = watcher.call_tools
    if hasattr(trainer, "_generate_single_turn"):
        trainer._generate_single_turn = watcher.sample
    callback.step_ended = watcher.write
    if ends := _ends(trainer):  # at the first one, TRL ends its mask
        callback.settings["eos_token_ids"] = sorted(ends)
    kind = next((known for one in type(trainer.args).__mro__ if (known := PENALTIES.get(one.__name__))), None)
    if kind is not None and trainer.beta > 0:
        callback.settings["kl"] = kind


class _Batch:
    """The rollouts of one generation, some of whose values are computed later."""

    def __init__(self, step: int, split: str, first: int) -> None:
        self.step, self.split, self.first = step, split, first
        self.rows: dict[str, list[Any]] = {}
        self.tokens: dict[str, Array] = {}
        self.completions: list[Any] = []
        """Each a text, or the chat messages of an episode."""
        self.drawn = Drawn()
        self.masks_tools = False
        """Whether the trainer has a mask of what tools wrote."""
        self.times: Times = {}
        self.scored: list[Any] = []
        """Log-probabilities that were computed while generating: the policy's first, then the reference's."""
        self.of_loss: dict[str, Array] = {}
        self.seen = np.zeros(0, np.bool_)
        """Which rollouts the loss has scored."""

    def add(self, lines: Array, columns: dict[str, Array]) -> None:
        """Store the values that the loss computed, for rollouts that it scores for the first time."""
        inside = (lines >= self.first) & (lines < self.first + len(self.seen))
        inside[inside] = ~self.seen[lines[inside] - self.first]
        places = lines[inside] - self.first
        for name, values in columns.items():
            column = self.of_loss.setdefault(name, np.zeros(self.tokens["attended"].shape))
            column[places, : values.shape[1]] = values[inside]
        self.seen[places] = True

    def columns(self) -> dict[str, Array]:
        """Return the token columns; those of the loss are included only if it has scored all rollouts."""
        return (self.of_loss if self.seen.all() else {}) | self.tokens


class _Watcher:
    def __init__(self, trainer: Any, callback: RecorderCallback) -> None:
        self._trainer = trainer
        self._callback = callback
        self._batches: list[_Batch] = []
        self._generating: _Batch | None = None
        self._lines: Array | None = None
        self._count = 0
        self._generate = trainer._generate_and_score_completions
        self._rewards = trainer._calculate_rewards
        self._score = trainer._get_per_token_logps_and_entropies
        self._loss = trainer._compute_loss
        self._call_tools: Any = getattr(trainer, "_tool_call_loop", None)
        self._sample: Any = getattr(trainer, "_generate_single_turn", None)

    def generate(self, inputs: Any) -> Any:
        training, now = self._trainer.model.training, self._trainer.state.global_step
        before = max(now - 1, self._callback.start)  # the step after which an evaluation is
        batch = _Batch(now, "train", self._count) if training else _Batch(before, "eval", self._count)
        self._generating = batch
        try:
            output = self._generate(inputs)
        finally:
            self._generating = None
        count = len(batch.rows["prompt"])
        columns = {name: [row[name] for row in inputs] for name in inputs[0] if all(name in row for row in inputs)}
        batch.rows |= _rows(self._trainer, output, now) | truths_of(columns)
        batch.tokens = _tokens(output, batch.scored)
        batch.masks_tools = "tool_mask" in output
        batch.seen = np.zeros(count, np.bool_)
        output[LINE] = output["completion_ids"].new_tensor(range(self._count, self._count + count))
        self._count += count
        self._batches.append(batch)
        return output

    def rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids: Any) -> Any:
        scores = self._rewards(inputs, prompts, completions, completion_ids)
        if self._generating is not None:
            trainer = self._trainer
            first = trainer.accelerator.process_index * len(prompts)  # the scores cover all processes
            mine = as_array(scores)[first : first + len(prompts)]
            weights = as_array(trainer.reward_weights).tolist()
            self._generating.rows |= text_rows(prompts, completions)
            self._generating.completions = list(completions)
            self._generating.rows |= reward_rows(trainer.reward_func_names, mine, weights)
        return scores

    def sample(self, *given: Any, **more: Any) -> Any:
        result = self._sample(*given, **more)
        if self._generating is not None:
            before = given[0] if given else more["prompt_ids"]
            ids = result[0] if isinstance(result, tuple) else result  # RLOO returns ids alone
            for turn in zip(before, ids, strict=True):
                self._generating.drawn.add(*turn)
        return result

    def call_tools(self, *given: Any, **more: Any) -> Any:
        times = self._generating.times if self._generating is not None else {}
        for name in ("_sync_tool_dicts", "_async_tool_dicts"):
            tools = getattr(self._trainer, name, None)  # TRL 1.10 has one for all rollouts
            if tools is not None:
                setattr(self._trainer, name, [timed_tools(some, row, times) for row, some in enumerate(tools)])
        return self._call_tools(*given, **more)

    def score(self, *given: Any, **more: Any) -> Any:
        result = self._score(*given, **more)
        if self._generating is not None:
            self._generating.scored.append(result[0])
        elif self._lines is not None:
            named = {"logprob": result[0], "entropy": result[1]}
            columns = {name: as_array(values) for name, values in named.items() if values is not None}
            for batch in self._batches:
                batch.add(self._lines, columns)
        return result

    def loss(self, model: Any, inputs: Any) -> Any:
        self._lines = as_array(inputs[LINE]).astype(np.int64) if LINE in inputs else None
        try:
            return self._loss(model, inputs)
        finally:
            self._lines = None

    def write(self) -> None:
        """Pass all rollouts to the callback and drop them: if a batch is reused later, the policy has changed."""
        for batch in self._batches if self._callback.records else ():  # not of an evaluation before training
            columns = batch.columns()
            sampled = _sampled(batch, columns)
            if batch.masks_tools or not all(map(all, sampled)):
                columns["source"] = _sources(batch, sampled)
            self._callback.rollouts(batch.step, batch.rows, columns, batch.split, _turns(batch, sampled))
        self._batches = []


def _sampled(batch: _Batch, columns: dict[str, Array]) -> list[list[bool]]:
    """Return of each rollout's tokens whether the policy sampled them."""
    found = []
    for row, (prompt, attended) in enumerate(zip(batch.rows["prompt_ids"], columns["attended"], strict=True)):
        own = {name: values[row][attended] for name, values in columns.items()}
        sampled = batch.drawn.sampled(prompt, own["token_id"].tolist())
        if sampled is None:  # a function of the user's called the engine
            sampled = was_sampled(own["learned"], own.get("sampler_logprob"), own.get("logprob"))
        found.append(sampled.tolist())
    return found


def _sources(batch: _Batch, sampled: list[list[bool]]) -> Array:
    """Return [B, T] the codes of the tokens' sources."""
    codes: Array = np.zeros(batch.tokens["attended"].shape, np.int8)
    for row, (completion, own) in enumerate(zip(batch.completions, sampled, strict=True)):
        codes[row, batch.tokens["attended"][row]] = [SOURCE_CODES[source] for source in sources_of(completion, own)]
    return codes


def _turns(batch: _Batch, sampled: list[list[bool]]) -> list[list[Turn]]:
    found = []
    for row, (completion, own) in enumerate(zip(batch.completions, sampled, strict=True)):
        turns = turns_of(completion, spans_of(completion, own) if is_messages(completion) else None)
        for turn in turns:
            seconds = batch.times.get((row, turn.get("name")), [])
            turn |= {"seconds": seconds.pop(0).seconds} if turn["role"] == "tool" and seconds else {}
        found.append(turns)
    return found


def _rows(trainer: Any, output: Any, now: int) -> dict[str, list[Any]]:
    ids, mask = as_array(output["completion_ids"]), as_array(output["completion_mask"])
    count, lengths = len(ids), mask.sum(1)
    ends = _ends(trainer)
    last = [row[length - 1] if length else None for row, length in zip(ids, lengths, strict=True)]
    return {
        "prompt_ids": without_padding(output["prompt_ids"].cpu(), output["prompt_mask"].cpu()),
        "finish_reason": ["eos" if token in ends else "length" for token in last],
        "policy_version": [now] * count,
        "kl_coef": [float(trainer.beta)] * count,
    }


def _ends(trainer: Any) -> set[int]:
    """Return the end tokens: those that the trainer knows, and the tokenizer's, at which it may forget to stop."""
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    known = [*(getattr(trainer, "eos_token_ids", None) or []), tokenizer.eos_token_id]
    return {int(end) for end in known if end is not None and end >= 0}


def _tokens(output: Any, scored: list[Any]) -> dict[str, Array]:
    """Return the token columns that are known once the rollouts are scored."""
    attended = as_array(output["completion_mask"]).astype(bool)
    learned = attended & as_array(output["tool_mask"]).astype(bool) if "tool_mask" in output else attended
    advantage = as_array(output["advantages"])
    columns = {"token_id": as_array(output["completion_ids"]), "attended": attended, "learned": learned}
    columns["advantage"] = np.broadcast_to(advantage[:, None] if advantage.ndim == 1 else advantage, attended.shape)
    if "old_logps" in output:  # RLOO keeps only sums, and always scores the policy before the reference
        named = dict(zip(("logprob", "ref_logprob"), scored, strict=False))
    else:
        named = {"logprob": output.get("old_per_token_logps"), "ref_logprob": output.get("ref_per_token_logps")}
        named["sampler_logprob"] = output.get("sampling_per_token_logps")
    return columns | {name: as_array(values) for name, values in named.items() if values is not None}
