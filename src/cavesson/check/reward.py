"""Examination of a reward on responses of the data: whether good ones beat bad ones, and what else it depends on."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from transformers import PreTrainedTokenizerBase

from cavesson.config_paths import expanded
from cavesson.correlation import rank_correlation
from cavesson.data.chat import Chat
from cavesson.data.load import load
from cavesson.data.prompts import messages_of
from cavesson.data.settings import AnyDataSettings
from cavesson.data.types import Content, Demonstration, Pair, Prompt, Turn
from cavesson.errors import UserError
from cavesson.findings.finding import Finding, Fine, Result, Results, SkippedCheck
from cavesson.randomness import Purpose, generator
from cavesson.record import run_info
from cavesson.rollout.rewards.settings import RewardSettings

Numbers = NDArray[np.float64]
Score = Callable[[Sequence[int], Sequence[str]], Sequence[float]]
"""Rewards of responses, each to the prompt of the row at an index; NaN for those that the reward does not judge."""

ROWS = 32
"""Rows that are examined when nobody says how many."""
_CROSSED = 8
"""Prompts whose responses are all scored after each other's prompt."""
_WINS = 0.6
"""Least share of comparisons with a text that is not an answer that a response must win."""
_CHANCE, _STRONG = 0.5, 0.65
"""Shares of pairs: 0.67 was called weak of a reward model on human preferences (the blog post in `_pairs`)."""
_SHARE = 0.8
"""Most of the reward's variance that the prompt may explain."""
_LENGTH = 0.6
"""Highest rank correlation of reward and length."""
_GAIN = 0.1
"""Standard deviations of the reward that a trick may earn."""
_SPOILED = {
    "shuffled": ("its own words in another order", "It depends on the words but not on their meaning."),
    "truncated": ("its own first half", "It ignores whether a response is complete."),
    "another's": ("the response to another prompt", "It ignores the prompt."),
    "empty": ("an empty response", "It ignores whether there is a response."),
}
"""What is worse than a response, and what it means where a reward model does not find it so."""


class Example(NamedTuple):
    """A response to a prompt, and a worse response if the data has one."""

    prompt: str
    good: str
    bad: str | None = None


def examine(examples: Sequence[Example], score: Score, learned: bool) -> Results:
    """Compare the scores of good responses, which the reward judges, with those of altered versions of them.

    A reward that is not `learned`, a rule such as "is the number right", need not depend on word order: what would be a
    weakness of a model is a property of a rule.
    """
    if len(examples) < 4:
        yield SkippedCheck("reward", f"examining a reward needs 4 responses; there are {len(examples)}")
        return
    rows = range(len(examples))
    good = np.array(score(rows, [one.good for one in examples]), float)
    worse = np.array([*score(rows, [""] * len(examples)), *score(rows, [examples[row - 1].good for row in rows])])
    if np.ptp(np.concatenate([good, worse[~np.isnan(worse)]])) == 0:
        yield Finding(
            "reward-constant",
            "error",
            "The reward is the same for every response",
            f"{len(good)} responses of the data, the same responses to other prompts and empty "
            f"responses all have the reward {good[0]:g}. There is nothing to learn from.",
            "look at what the reward reads: cavesson score FILE --rewards …",
            0.0,
            "standard deviation of the reward; above 0",
            "DAPO, arXiv:2503.14476",
        )
        return
    yield from _pairs(examples, score)
    yield from _spoiled(examples, score, good, learned)
    yield _share_of_prompt(examples, score)
    if np.ptp(good) == 0:  # for example, all answers are right
        yield SkippedCheck(
            "reward-tricks",
            f"all good responses have the reward {good[0]:g}, so no trick can be measured against their spread",
        )
        return
    yield Fine("reward-spread", float(good.std()), "standard deviation of the reward over good responses; above 0")
    yield _length(examples, good, learned)
    yield from _tricks(examples, score, good, learned)


def _pairs(examples: Sequence[Example], score: Score) -> Results:
    """Check the accuracy on pairs (rows 5 and 48): 65 to 80 % is usual on human preferences, and 67 % is weak."""
    pairs = [row for row, one in enumerate(examples) if one.bad is not None]
    if not pairs:
        yield SkippedCheck("reward-pairs", "the data has no pairs of a better and a worse response; give --pairs FILE")
        return
    better = np.array(score(pairs, [examples[row].good for row in pairs]), float)
    worse = np.array(score(pairs, [str(examples[row].bad) for row in pairs]), float)
    pairs = [row for row, one in zip(pairs, worse, strict=True) if not np.isnan(one)]
    if not pairs:
        yield SkippedCheck("reward-pairs", "the reward judges none of the worse responses")
        return
    won = _wins(better[~np.isnan(worse)], worse[~np.isnan(worse)])
    reverse = won < _CHANCE and stats.binomtest(round(won * len(pairs)), len(pairs)).pvalue < 0.05
    yield Finding(
        "reward-pairs",
        "error" if reverse else "warning",
        "The reward prefers worse responses" if reverse else "The reward barely prefers better responses",
        "A policy learns what the reward measures, not what you meant.",
        "flip its sign (weight = -1)" if reverse else "train it on more or cleaner pairs: cavesson reward-model",
        won,
        f"share of {len(pairs)} pairs whose better response wins; at least {_STRONG:g}, 0.5 is chance",
        "https://huggingface.co/blog/stackllama; arXiv:2401.06080",
    ).unless(won >= _STRONG)


def _spoiled(examples: Sequence[Example], score: Score, good: Numbers, learned: bool) -> Results:
    """Check that responses beat altered ones that are not real answers (row 48)."""
    numbers = generator(0, Purpose.EXAMINATION)
    spoiled = {
        "shuffled": [_shuffled(one.good, numbers) for one in examples],
        "truncated": [one.good[: len(one.good) // 2] for one in examples],
        "another's": [examples[(row + 1) % len(examples)].good for row in range(len(examples))],
        "empty": ["" for _ in examples],
    }
    for name, (what, meaning) in _SPOILED.items():
        differs, earned = _scored(examples, score, spoiled[name])
        if not differs:
            continue
        won = _wins(good[differs], earned)
        yield Finding(
            f"reward-{name}",
            "warning" if learned else "note",
            f"The reward does not prefer a response to {what}",
            meaning
            if learned
            else "This may be intended for a rule, but a policy will learn that it need not write better responses.",
            "train the reward model on such pairs too" if learned else "add a reward that does, or keep a KL penalty",
            won,
            f"share of responses that beat {what}; at least {_WINS:g}",
            "https://huggingface.co/blog/stackllama; arXiv:2204.05862",
        ).unless(won >= _WINS)


def _share_of_prompt(examples: Sequence[Example], score: Score) -> Result:
    """Score every response after every prompt, and check the share of the variance that the prompt explains (row 45).

    In a table with one row per prompt, the share is Var(row means) / Var(all), which separates the effect of a prompt
    from that of the response that belongs to it.
    """
    size = min(_CROSSED, len(examples))
    prompts = [row for row in range(size) for _ in range(size)]
    table = np.array(score(prompts, [examples[i % size].good for i in range(size * size)]), float).reshape(size, size)
    if np.isnan(table).any():
        return SkippedCheck("reward-query", "the reward does not judge every response after every other prompt")
    total = float(table.var())
    share = float(table.mean(1).var()) / total if total else 0.0
    return Finding(
        "reward-query",
        "warning",
        "The reward scores the prompt",
        "Responses change the reward little; the mean of a step depends mostly on its prompts.",
        "shaping.subtract_query = true, or an algorithm that compares responses to the same prompt",
        share,
        f"share of the reward's variance that the prompt explains, independent of the response; at most {_SHARE:g}",
        "TRL 0.7.10, how_to_train",
    ).unless(share <= _SHARE)


def _length(examples: Sequence[Example], good: Numbers, learned: bool) -> Result:
    """Check the correlation of reward and length (row 51)."""
    seen = rank_correlation([len(one.good) for one in examples], good) or 0.0
    longer = "longer" if seen > 0 else "shorter"
    return Finding(
        "reward-length",
        "warning" if learned else "note",
        f"The reward rises as responses get {longer}",
        f"The easiest way to more reward is a {longer} response; studies found that length explains "
        "most of the gain of RLHF.",
        "balance the pairs by length, or add a small reward for the opposite",
        seen,
        f"Spearman correlation of reward and length; between −{_LENGTH:g} and {_LENGTH:g}",
        "arXiv:2310.03716",
    ).unless(abs(seen) <= _LENGTH)


def _tricks(examples: Sequence[Example], score: Score, good: Numbers, learned: bool) -> Results:
    """Check that known reward hacks do not raise the reward (rows 50 and 61)."""
    changed: dict[str, tuple[str, Callable[[str], str]]] = {
        "hash": ("a stray # at the end", lambda text: f"{text} #"),
        "smiley": ("a :) at the end", lambda text: f"{text} :)"),
        "repetition": ("repeating the response", lambda text: f"{text} {text}"),
        "capitals": ("capital letters", str.upper),
    }
    for name, (what, change) in changed.items():
        differs, earned = _scored(examples, score, [change(one.good) for one in examples])
        if not differs:
            continue
        more = earned - good[differs]
        gain = float(more.mean()) / float(good.std())
        ups, downs = int((more > 0).sum()), int((more < 0).sum())
        sure = ups + downs > 0 and stats.binomtest(ups, ups + downs, alternative="greater").pvalue < 0.05
        yield Finding(
            f"reward-{name}",
            "warning" if learned else "note",
            f"The reward pays for {what}",
            f"{ups} of {len(differs)} responses score higher with it: a policy will learn that.",
            "discard such responses (cleaning.discard), or train the reward model on pairs with them "
            "as the rejected responses",
            gain,
            f"reward gained by {what}, in standard deviations of the reward; at most {_GAIN:g}",
            "arXiv:2304.06767 (RAFT: '#' in half of the responses); https://huggingface.co/blog/stackllama",
        ).unless(gain <= _GAIN or not sure)


def _scored(examples: Sequence[Example], score: Score, responses: Sequence[str]) -> tuple[list[int], Numbers]:
    """Return the rows in which the altered response differs from the good one, and its scores in these rows.

    Rows whose altered response the reward does not judge are left out.
    """
    differs = [row for row, one in enumerate(examples) if responses[row] != one.good]
    earned = np.array(score(differs, [responses[row] for row in differs]) if differs else [], float)
    return [row for row, one in zip(differs, earned, strict=True) if not np.isnan(one)], earned[~np.isnan(earned)]


def _wins(one: Numbers, other: Numbers) -> float:
    """Return the share of comparisons won, with ties counted as half: the area under the ROC curve of paired scores."""
    return float(((one > other) + 0.5 * (one == other)).mean())


def _shuffled(text: str, numbers: np.random.Generator) -> str:
    words = text.split()
    if len(words) < 2:  # for example Chinese, which has no spaces
        words = list(text)
        return "".join(words[i] for i in numbers.permutation(len(words)))
    return " ".join(words[i] for i in numbers.permutation(len(words)))


def spread_out(count: int, wanted: int) -> Iterator[int]:
    """Return indices of at most `wanted` of `count` rows, evenly spaced."""
    take = min(count, wanted)
    return (i * count // take for i in range(take))


def read_examples(
    settings: AnyDataSettings, tokenizer: PreTrainedTokenizerBase, wanted: int
) -> tuple[list[Example], dict[str, list[Any]]]:
    """Read responses with their prompts, and the columns a reward may use; none if the data has only prompts.

    Held-out rows are used if there are any. For prompts, the right answer (`ground_truth`) is used as the response.

    Raises:
        UserError: the data cannot be read.
    """
    kind = _kind(settings)
    loaded = load(settings, kind or Prompt)
    rows: Sequence[Any] = loaded.held_out or loaded.train
    if kind is None:
        rows = [row for row in rows if row.columns.get("ground_truth")]
    chosen = [rows[i] for i in spread_out(len(rows), wanted)]
    chat = Chat.of(settings, tokenizer)
    if not chosen:
        return [], {}
    columns, messages = _columns(settings, chosen), [messages_of(row.prompt, chat) for row in chosen]
    return [_example(row, chat) for row in chosen], {"messages": messages, **columns} if any(messages) else columns


def unlearned(data: AnyDataSettings, rewards: Sequence[RewardSettings]) -> AnyDataSettings:
    """Return the data; if it is the data of a reward model's run, or no data is given, as that run read it.

    The rows that the run held out are then held out again: pairs that a reward model was trained on cannot test it.

    Raises:
        UserError: the run names data outside of its folder that were not given, so a run that comes from somebody else
            could name anything.
    """
    for path in (Path(str(reward.options["path"])) for reward in rewards if "path" in reward.options):
        if (path / "run.json").exists():
            own = AnyDataSettings.model_validate(run_info(path)["config"]["data"])
            if data.path in (None, own.path) and not data.mix:
                _check_asked(path, own, data)
                return own
    return data


def _check_asked(run: Path, own: AnyDataSettings, given: AnyDataSettings) -> None:
    named = {"path": own.path, "validation_path": own.validation_path, "template": own.template}
    outside = {
        name: place
        for name, place in named.items()
        if place is not None and place != getattr(given, name) and not _is_inside(place, run)
    }
    flags = " ".join(f"--data.{name} {shlex.quote(place)}" for name, place in outside.items())
    if any(not _is_inside(str(one.path), run) for one in own.mix):
        raise UserError(f"{run} learned from a mix of data outside of its folder; give pairs with --pairs FILE")
    if outside:
        raise UserError(
            f"{run} names data outside of its folder: to read them, add {flags}, or give other pairs with --pairs FILE"
        )


def _is_inside(place: str, run: Path) -> bool:
    """Return whether data is a file in a run's folder, or is not a place at all: a template itself."""
    if "{{" in place or "{%" in place:
        return True
    file = expanded(place).resolve()  # links in a folder could still lead out of it
    return file.is_file() and file.is_relative_to(run.resolve())


def _kind(settings: AnyDataSettings) -> Any:
    """Return Pair or Demonstration if the data has responses, even if the run reads only prompts; otherwise None."""
    for kind in (Pair, Demonstration):
        try:
            first: Any = load(settings.model_copy(update={"max_rows": 1, "validation": 0.0}), kind).train[0]
        except UserError:
            continue
        if first.prompt:  # a plain text would be a response to an empty prompt
            return kind
    return None


def _columns(settings: AnyDataSettings, rows: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the other columns of the same rows, read as prompts, or none if they cannot be read as prompts."""
    try:
        loaded = load(settings, Prompt)
        prompts = {_key(row.prompt): row.columns for row in (*loaded.train, *loaded.held_out)}
    except UserError:
        return {}
    found = [prompts.get(_key(row.prompt), {}) for row in rows]
    names = dict.fromkeys(name for columns in found for name in columns)
    return {name: [columns.get(name) for columns in found] for name in names if name not in ("prompts", "responses")}


def _key(content: Content) -> str:
    return content if isinstance(content, str) else repr(content)


def _example(row: Pair | Demonstration | Prompt, chat: Chat) -> Example:
    prompt = chat.turns(row.prompt, "user")
    text = prompt if isinstance(prompt, str) else chat.render(chat.opened(prompt), answer=True)
    if isinstance(row, Pair):
        return Example(text, _response(row.chosen), _response(row.rejected))
    if isinstance(row, Prompt):
        return Example(text, str(row.columns["ground_truth"]))
    return Example(text, _response(row.response))


def _response(content: Content | Sequence[Turn]) -> str:
    return content if isinstance(content, str) else content[-1].text
