"""Rules on whether the recorded tokens are those of the response: of its text, and none of the prompt."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.reading import Curve, Reading, Words
from cavesson.doctor.rule import Disproof, rule
from cavesson.doctor.rules.consequences import MISLED, MISMATCH
from cavesson.doctor.sample import Sample
from cavesson.doctor.series import Array, since
from cavesson.findings.words import Phrase, Share

MIN_RESPONSES = 20
"""Responses that must be readable."""
MIN_PROMPT = 3
"""Tokens or characters of a prompt with which a response does not begin by chance."""
SPECIAL = re.compile(r"<[^<>]{1,40}>|\[[A-Z_]{2,20}\]")
"""What looks like the text of a special token, in a text without spaces."""
SPACES = ("\\n", "Ġ", "Ċ", "▁")
"""White space as logs and tokenizers write it: decoding one token at a time keeps or loses it."""
BROKEN = "\ufffd"
"""A part of a character that several tokens make up."""
SHOWN = 30
"""Characters of an example."""
LATE = Phrase("the first token is missing, so the slice of the response begins one token late")
EARLY = Phrase("they begin with the end of the prompt, so the slice of the response begins one token early")
OTHER = Phrase("they are those of another text: of another row, another tokenizer, or text that was tokenised again")
UNMASKED = Phrase("the record has the tokens of the prompt, and does not show whether the loss leaves them out")


class _Both(NamedTuple):
    """What a response says, without white space and special tokens."""

    line: int
    """Which rollout it is of."""
    text: str
    decoded: str
    """What its tokens say."""
    pieces: list[str]
    """The text of each of them, as it is."""
    prompt: str


@rule(
    number=88,
    needs=["tokens.token_id", "rows.response"],
    severity="error",
    title="The tokens are not those of the response",
    cause="In {seen} of the responses, the token ids do not decode to the text: {what}. In one of them, the text is "
    "{text}, and the tokens say {decoded}. The policy learns from other tokens than those that were scored.",
    healthy="share of the responses of a step whose token ids decode to another text: below {limit}; white space, "
    "special tokens, and what one of both lacks at the start, at the end or in the middle do not count",
    fix="keep the token ids that the sampler returned, and check the slice that takes the response out of the sequence "
    "and the order of the rows: decode a few responses and compare them with their texts",
    source="vLLM blog, Agent Lightning (2025); own threshold",
    explains=["sampler-stale", "filtered-sampling", "temperature-missing", "end-forbidden", "kl-at-start",
              "negative-kl", "same-seed", "trained-behind-end", "end-not-trained", "false-truncation", "garbled",
              "verifier-dead", "reward-is-noise", *MISMATCH, *MISLED],
    disproof=Disproof(("tokens.token_id",), "the ids decode to the text of the response"),
)  # fmt: skip
def tokens_of_other_text(data: RunData, *, limit: float = Share(0.5)) -> Reading | None:
    read = _read(data)
    if len(read) < MIN_RESPONSES:
        return None
    wrong = _differing(data, read)
    has = np.full(len(data.sample.rows), np.nan)
    has[[one.line for one in read]] = [one.line in wrong for one in read]
    points = data.sample.rows.by_step(has)
    first = since(points, points.value > limit, min(3, len(points)))
    share = Share(points.after(first).value.mean())
    lines = sorted(line for line in wrong if first is None or data.sample.rows.step[line] >= first)
    words: Words = {}
    if lines:
        example = next(one for one in read if one.line == lines[0])
        what = Counter(wrong[line] for line in lines).most_common(1)[0][0]
        words = {"what": what, **_shown(example)}
    return Reading(share, first is not None, first, data.sample.rows.evidence(lines), words, Curve(points, high=limit))


def _read(data: RunData) -> list[_Both]:
    """Return what responses say whose tokens can be read; none of episodes, whose text may have more than the tokens.

    Nothing is returned if the vocabulary is not recorded.
    """
    sample = data.sample
    if not data.run.vocabulary.num_rows or data.recorded("turns.role") or (sample.source > 0).any():
        return []
    found = []
    texts, prompts = sample.rows.texts("response"), sample.rows.texts("prompt")
    for line, tokens in _tokens(sample):
        if np.isfinite(tokens).all():
            pieces = data.run.token_texts(tokens.astype(int).tolist())
            text, decoded, prompt = _plain([texts[line] or "", "".join(pieces), prompts[line] or ""])
            if text and decoded:
                found.append(_Both(line, text, decoded, pieces, prompt))
    return found


def _tokens(sample: Sample) -> list[tuple[int, Array]]:
    """Return the tokens of each rollout that has some, without gaps between them."""
    lines, start = np.unique(sample.line, return_index=True)
    count = np.bincount(sample.line, minlength=len(sample.rows))
    is_whole = np.bincount(sample.line, sample.position, len(sample.rows)) == count * (count - 1) / 2
    each = zip(lines.tolist(), np.split(sample["token_id"], start[1:]), strict=True) if len(lines) else ()
    return [(line, ids) for line, ids in each if is_whole[line]]


def _plain(texts: Sequence[str]) -> list[str]:
    """Return texts without what may differ between a text and its tokens one by one.

    If one of them has a part of a character, none keeps characters that could be made of such parts.
    """
    found = [SPECIAL.sub("", _without_spaces(text)).rstrip(".…") for text in texts]
    if any(BROKEN in text for text in found):
        found = [text.encode("ascii", "ignore").decode() for text in found]
    return found


def _without_spaces(text: str) -> str:
    for space in SPACES:
        text = text.replace(space, "")
    return "".join(text.split())


def _differing(data: RunData, read: Sequence[_Both]) -> dict[int, Phrase]:
    """Return the rollouts whose tokens say something else than their text, and what is wrong with them."""
    lacking = {one.line: one.text.removesuffix(one.decoded) for one in read if one.text.endswith(one.decoded)}
    varies = len(set(lacking.values()) - {""}) > 1  # else it is what all responses are made to begin with
    single = set(_plain(data.run.vocabulary["text"].drop_null().to_pylist())) if varies else set()
    found = {}
    for one in read:
        lost = lacking.get(one.line, "")
        if _begins_early(one):
            found[one.line] = EARLY
        elif lost in single - {""} and not one.prompt.endswith(lost):
            found[one.line] = LATE
        elif not _is_part(one.text, one.decoded):
            found[one.line] = OTHER
    return found


def _begins_early(one: _Both) -> bool:
    """Return whether the first token is the end of the prompt, and the text does not begin with it."""
    (first,) = _plain(one.pieces[:1])
    rest = one.decoded.removeprefix(first)
    is_end = first != "" and one.prompt.endswith(first) and one.decoded != rest != ""
    return is_end and one.text.startswith(rest) and not one.text.startswith(one.decoded)


def _is_part(one: str, other: str) -> bool:
    """Return whether one of two texts lacks only the start, the end, both, or one piece in the middle of the other."""
    short, long = sorted((one, other), key=len)
    return short in long or long.endswith(short[_equal(short, long) :])


def _equal(one: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


def _shown(one: _Both) -> Words:
    """Return the first differences as an example."""
    same = max(0, _equal(one.text, one.decoded) - SHOWN // 3)
    return {"text": repr(one.text[same : same + SHOWN]), "decoded": repr(one.decoded[same : same + SHOWN])}


@rule(
    number=89,
    needs=["tokens.token_id", "tokens.learned", "rows.prompt_ids|rows.prompt"],
    recorded=["tokens.learned"],
    severity="error",
    training_only=True,
    title="Tokens of the prompt are trained on",
    cause="{seen} of the responses begin with their prompt, {tokens} tokens of it on average, and these count in the "
    "loss: the mask of the loss covers the whole sequence, so the policy learns to write its prompts.",
    healthy="share of the responses of a step that begin with the tokens of their prompt, and learn from them: below "
    "{limit}",
    fix="let the mask of the loss begin at the first token that was sampled",
    source="TRL (completion_mask); own threshold",
    explains=["kl-at-start", "kl-in-few-tokens", "kl-explosion", "negative-kl", "reward-position", "truncated",
              "reward-accounting", "penalty-wrong", "length-collapse", "entropy-explosion", "entropy-collapse",
              "filtered-sampling", "temperature-missing", "end-forbidden", "padding-counted", "garbled",
              "sampler-stale", "likelihood-displacement", "double-start", *MISMATCH],
    disproof=Disproof(("tokens.learned", "tokens.advantage"), "the tokens of the prompt are not trained on"),
)  # fmt: skip
def prompt_trained(data: RunData, *, limit: float = Share(0.5)) -> Reading | None:
    sample = data.sample
    leading = _of_prompt(data) if sample.rows.recorded("prompt_ids") else _of_prompt_text(data)
    known = np.isfinite(leading)
    if known.sum() < MIN_RESPONSES:
        return None
    begin = np.searchsorted(sample.line, np.arange(len(sample.rows)))
    inside = np.arange(len(sample)) - begin[sample.line] < leading[sample.line]
    learned = inside & sample.trained
    if sample.recorded("advantage"):
        learned &= np.nan_to_num(sample["advantage"]) != 0
    has = np.bincount(sample.line[learned], minlength=len(sample.rows)) > 0
    points = sample.rows.by_step(np.where(known, has, np.nan))
    first = since(points, points.value > limit, min(3, len(points)))
    # A mask of the loss has been recorded if it leaves out something; else the recorder may have been given none.
    shows = sample.recorded("advantage") or not sample.trained.all()
    share = Share(points.after(first).value.mean())
    words: Words = {"tokens": float(np.sum(learned) / max(1, has.sum()))}
    spans = sample.spans(np.flatnonzero(learned))
    undecided = UNMASKED if first is not None and not shows else None
    return Reading(
        share, first is not None and shows, first, spans, words, Curve(points, high=limit), undecided=undecided
    )


def _of_prompt(data: RunData) -> Array:
    """Return [n] how many tokens of its prompt each rollout begins with: all, with or without the first; else 0."""
    rows = data.sample.rows
    found, prompts = np.full(len(rows), np.nan), rows.texts("prompt_ids")
    for line, ids in _tokens(data.sample):
        prompt = np.array(prompts[line] or (), np.float64)
        if len(prompt) >= MIN_PROMPT:
            ways = (prompt, prompt[1:])
            found[line] = max(len(way) * np.array_equal(ids[: len(way)], way) for way in ways)
    return found


def _of_prompt_text(data: RunData) -> Array:
    """Return [n] how many tokens come before the text of the response, if they contain the prompt; else 0."""
    found = np.full(len(data.sample.rows), np.nan)
    for one in _read(data):
        if len(one.prompt) >= MIN_PROMPT:
            before = one.decoded[: -len(one.text)]
            is_prompt = one.decoded.endswith(one.text) and one.prompt in before
            lengths = np.cumsum([len(piece) for piece in _plain(one.pieces)]) if is_prompt else ()
            found[one.line] = np.searchsorted(lengths, len(before)) + 1 if is_prompt else 0
    return found
