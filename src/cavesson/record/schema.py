"""Every column of the record, declared once."""

from collections.abc import Iterable
from dataclasses import dataclass

# pyarrow asks numpy for this module when it first converts an array. numpy loads it only then, and numpy 2.4 recurses
# without end if another thread does the same at that moment, so it is loaded before there are threads.
import numpy.ma  # noqa: F401
import pyarrow as pa

from cavesson.record.precision import Grid, Mantissa, Precision


@dataclass(frozen=True)
class Column:
    """One column of the record; a missing column or a null means "not measured", never zero."""

    name: str
    type: pa.DataType
    doc: str
    required: bool = False
    nullable: bool = False
    """whether a row may lack a value although the column is required"""
    precision: Precision | None = None
    """How the recorder rounds it; None keeps every bit. Importers keep every bit of every column."""


LOGPROB = Grid(17)
"""Log-probabilities: their differences are what matters, and stay exact to 2^-17 = 7.6e-6 nats."""
SIGNAL = Mantissa(10)
"""What only steers or explains training: a relative error of at most 2^-11 = 0.05 %."""

ROW_COLUMNS = (
    Column("step", pa.int32(), "optimisation step the rollout was sampled for", required=True),
    Column("attempt", pa.int16(), "attempt that wrote it: 0 for the start of the run, and 1 more with each resume"),
    Column("rank", pa.int16(), "process that wrote it"),
    Column("group", pa.int64(), "index of the prompt among those kept of the data set, held-out ones last"),
    Column("sample", pa.int32(), "index in the step's global batch; with step it is the key", required=True),
    Column("split", pa.string(), "train, eval for held-out prompts, or given for responses that the data give"),
    Column("prompt", pa.string(), "text of the prompt", required=True),
    Column("response", pa.string(), "response as text", required=True),
    Column("prompt_ids", pa.list_(pa.int32()), "token ids of the prompt, without padding"),
    Column(
        "reward",
        pa.float64(),
        "weighted sum of the parts, or the reward of discards; unscaled; null if no part judges the response",
        required=True,
        nullable=True,
    ),
    Column("reward_parts", pa.map_(pa.string(), pa.float64()), "score of each reward by its name, before weighting"),
    Column("reward_weights", pa.map_(pa.string(), pa.float64()), "weight of each of these parts in the reward"),
    Column("reward_reasons", pa.map_(pa.string(), pa.string()), "reasons that rewards gave, by the part"),
    Column(
        "shaped_reward", pa.float64(), "reward used in training: after query baseline, scaling, clipping, EOS penalty"
    ),
    Column("next_value", pa.float64(), "the critic's estimate of the return after a response that a limit has cut"),
    Column(
        "ref_response",
        pa.string(),
        "the reference policy's response to the same prompt; in an evaluation, the response before training",
    ),
    Column("ref_reward", pa.float64(), "reward of ref_response"),
    Column("ground_truth", pa.string(), "the answer the data set gives"),
    Column("finish_reason", pa.string(), "eos, stop or length"),
    Column(
        "policy_version",
        pa.int32(),
        "number of training steps of the weights that sampled it, its first token if they changed",
    ),
    Column("kl_coef", pa.float64(), "KL coefficient in force when it was sampled"),
    Column("length", pa.int32(), "response tokens that training learned from"),
    Column("kl_k1", pa.float64(), "sum over the response of Δ = logprob − ref_logprob, in nats"),
    Column("kl_k3", pa.float64(), "mean over the tokens of e^(−Δ) − 1 + Δ, in nats"),
    Column("teacher_kl", pa.float64(), "sum over the response of logprob − teacher_logprob, in nats"),
    Column("log_ratio_max", pa.float64(), "largest absolute value of logprob − ref_logprob of a token, in nats"),
    Column("entropy", pa.float64(), "mean over the tokens of the policy's entropy, in nats"),
    Column("sampler_gap", pa.float64(), "mean over the tokens of |logprob − sampler_logprob|, in nats"),
    Column("value_error", pa.float64(), "root of the mean over the tokens of (value − return)²"),
    Column("distinct_2", pa.float64(), "different pairs of neighbouring tokens, divided by all pairs"),
    Column("repetition", pa.float64(), "share of the 4-grams of tokens that occur earlier in the response"),
    Column("turns", pa.int32(), "turns of the policy, the assistant; null if the turns are unknown"),
    Column("calls", pa.int32(), "calls of tools"),
    Column("call_errors", pa.int32(), "calls of tools that failed"),
    Column("extra", pa.string(), "JSON object of all other columns"),
)

TOKEN_COLUMNS = (
    Column("step", pa.int32(), "as in rows", required=True),
    Column("sample", pa.int32(), "as in rows", required=True),
    Column("position", pa.int32(), "index in the response, from 0", required=True),
    Column("token_id", pa.int32(), "id in the vocabulary; null if only the text is known"),
    Column("token", pa.string(), "the token as text, if the source gave text instead of ids"),
    Column(
        "learned",
        pa.bool_(),
        "whether training learned from the token; false for what a tool, a user or the chat template wrote",
    ),
    Column("source", pa.string(), "where the token comes from: sampled, template, tool, user or data"),
    Column("logprob", pa.float32(), "log probability under the policy before the update, in nats", precision=LOGPROB),
    Column("ref_logprob", pa.float32(), "log probability under the reference policy, in nats", precision=LOGPROB),
    Column(
        "teacher_logprob",
        pa.float32(),
        "log probability under the teacher that is distilled, in nats",
        precision=LOGPROB,
    ),
    Column("sampler_logprob", pa.float32(), "log probability as the sampler reported it, in nats", precision=LOGPROB),
    Column("sampler_version", pa.int32(), "as policy_version, in steps in which the weights changed within a response"),
    Column("value", pa.float32(), "the critic's estimate of the return from here", precision=SIGNAL),
    Column("token_reward", pa.float32(), "KL penalty plus the reward, on the last token if sparse", precision=SIGNAL),
    Column("advantage", pa.float32(), "advantage that training used", precision=SIGNAL),
    Column("return", pa.float32(), "the critic's target", precision=SIGNAL),
    Column("entropy", pa.float32(), "entropy of the policy's distribution, in nats", precision=SIGNAL),
)
"""Float columns are float32, or float64 in a segment where a value needs it."""

SOURCES = ("sampled", "template", "tool", "user", "data")
"""Where a token comes from: the policy, the chat template between turns, the result of a tool, a user's reply, or a
response that the data give.

A source's index here is its code."""
SOURCE_CODES: dict[str | None, int] = {None: -1, "sampled": 0, "template": 1, "tool": 2, "user": 3, "data": 4}
"""Source, None for an unknown one → its code."""

TURN_COLUMNS = (
    Column("step", pa.int32(), "as in rows", required=True),
    Column("attempt", pa.int16(), "as in rows"),
    Column("rank", pa.int16(), "as in rows"),
    Column("sample", pa.int32(), "as in rows", required=True),
    Column("turn", pa.int32(), "index in the episode, from 0", required=True),
    Column("role", pa.string(), "who speaks: assistant, tool, user, …", required=True),
    Column("name", pa.string(), "of a tool's turn: the tool that was called"),
    Column("arguments", pa.string(), "of a tool's turn: JSON object of the arguments of the call"),
    Column("text", pa.string(), "what the turn says; of a tool's turn, the result as the model sees it"),
    Column("first_token", pa.int32(), "position of its first token in the response"),
    Column("tokens", pa.int32(), "number of its tokens"),
    Column("seconds", pa.float64(), "seconds that it took: sampling, the call, or the environment's reply"),
    Column("error", pa.string(), "why a call failed; null if it did not"),
    Column("reward", pa.float64(), "reward of this turn alone"),
)

TOKEN_PLACES = (
    Column("token_start", pa.int64(), "first line of its tokens in the tokens file of the same name"),
    Column("token_count", pa.int32(), "number of these lines"),
)
TURN_PLACES = (
    Column("turn_start", pa.int64(), "first line of its turns in the turns file of the same name"),
    Column("turn_count", pa.int32(), "number of these lines"),
)
PLACE_COLUMNS = (*TOKEN_PLACES, *TURN_PLACES)
"""What a file of rows has besides, for who reads the files themselves; the latter if there is a file of turns."""

STEP_COLUMNS = (
    Column("step", pa.int32(), "optimisation step", required=True),
    Column("attempt", pa.int16(), "attempt that wrote it", required=True),
)
"""What every row of the steps table has; each metric is one more float64 column."""


def arrow_schema(columns: Iterable[Column]) -> pa.Schema:
    """Return the Arrow schema of ``columns``, with each ``doc`` in its field's metadata."""
    return pa.schema(
        [pa.field(c.name, c.type, nullable=c.nullable or not c.required, metadata={"doc": c.doc}) for c in columns],
    )
