"""Special tokens in texts: those written by a chat template are control tokens, those in the data are plain text."""

import json
import re
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain, takewhile
from typing import Any, NamedTuple, cast

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from cavesson.errors import UserError

Span = tuple[int, int]
"""The first character and the one after the last."""
_PRIVATE = range(0xF0000, 0x10FFFE)
"""Code points that Unicode gives to nobody, as signs that stand for others."""


class Written(str):
    """A text in which some special tokens are control tokens; a plain `str` has no control tokens."""

    control: tuple[Span, ...]
    """where they stand; every other special token in it is text"""

    def __new__(cls, text: str, control: Iterable[Span] = ()) -> "Written":
        written = super().__new__(cls, text)
        written.control = tuple(control)
        return written


class Encoded(NamedTuple):
    """The tokens of one text."""

    ids: list[int]
    offsets: list[Span]


class SpecialTokens:
    """The special tokens of a tokenizer, and tokenization that does not mistake user text for them.

    Added tokens that the tokenizer does not mark as special, such as `<think>`, are always ordinary text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        called = set(tokenizer.all_special_tokens)
        added = tokenizer.added_tokens_decoder.items()
        names = {token.content: number for number, token in added if token.special or token.content in called}
        # Any text can produce the unknown token, so it does not count as special.
        self._ids = frozenset(names.values()) - {tokenizer.unk_token_id}
        self.names = sorted(names, key=lambda name: (-len(name), name))  # the longest match wins
        self._pattern = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")

    def spans(self, text: str) -> list[Span]:
        """Return the spans of the special tokens in a text."""
        return [found.span() for found in self._pattern.finditer(text)]

    def within(self, texts: Iterable[str]) -> list[str]:
        """Return the distinct special tokens that occur in some texts."""
        return list(dict.fromkeys(found for text in texts for found in self._pattern.findall(text)))

    def disguise(self, texts: Iterable[str]) -> "Disguise":
        """Return a disguise that hides special tokens in these texts from a template, without changing their length."""
        return Disguise(self._pattern, "".join(texts))

    def encode(self, texts: Sequence[str], *, add: bool, longest: int | None = None) -> list[Encoded]:
        """Tokenize texts.

        Args:
            texts: texts to tokenize; those of type `Written` may have control tokens, a plain `str` has none.
            add: whether to add the special tokens that the tokenizer adds to every text.
            longest: maximum number of tokens; longer texts are cut at the tokenizer's ``truncation_side``.

        Raises:
            UserError: a special token must be read as text, but the tokenizer is not a fast one.
        """
        fast = self.tokenizer.is_fast
        limit = {} if longest is None else {"truncation": True, "max_length": longest}
        found = self.tokenizer([*map(str, texts)], add_special_tokens=add, return_offsets_mapping=fast, **limit)
        offsets = found["offset_mapping"] if fast else [[] for _ in texts]
        encoded = [Encoded(ids, places) for ids, places in zip(found["input_ids"], offsets, strict=True)]
        hostile = [row for row, text in enumerate(texts) if self._has_more(text, encoded[row].ids, add)]
        if hostile:
            literal = self._as_text([texts[row] for row in hostile], add, longest)
            for row, one in zip(hostile, literal, strict=True):
                encoded[row] = one
        return encoded

    def _has_more(self, text: str, ids: list[int], add: bool) -> bool:
        """Return whether the text, as given or after normalization, has special tokens besides its control tokens."""
        control = text.control if isinstance(text, Written) else ()
        if tuple(self.spans(text)) != control:
            return True
        added = self.tokenizer.num_special_tokens_to_add() if add else 0
        return sum(map(self._ids.__contains__, ids)) > len(control) + added

    def _as_text(self, texts: Sequence[str], add: bool, longest: int | None) -> list[Encoded]:
        if not self.tokenizer.is_fast:
            raise UserError(
                f"the data contains {', '.join(self.within(texts))}, which only a fast tokenizer (one with a "
                'tokenizer.json) reads as text; set data.special_tokens = "control" to read them as control tokens'
            )
        first = _free("".join(texts), len(self.names))
        signs = {name: chr(first + number) * len(name) for number, name in enumerate(self.names)}
        disguised = [_with_signs(text, signs) for text in texts]
        backend = _renamed(self._backend, first, tuple(self.names))
        if longest is None:
            backend.no_truncation()
        else:
            backend.enable_truncation(longest, direction=self.tokenizer.truncation_side)
        return [Encoded(one.ids, one.offsets) for one in backend.encode_batch(disguised, add_special_tokens=add)]

    @cached_property
    def _backend(self) -> str:
        return str(cast(Any, self.tokenizer).backend_tokenizer.to_str())


_TRIED = 1000
"""Tokens that are tried as a whole text; the first ones are often special, or bytes."""


class Around(NamedTuple):
    """Special tokens that a tokenizer adds around every text."""

    start: tuple[int, ...]
    end: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "Around":
        """Return those of a tokenizer, found around a text that is a single token, which not every text is."""
        is_special = set(tokenizer.all_special_ids).__contains__
        texts = chain("a", (str(tokenizer.decode([number])) for number in range(min(len(tokenizer), _TRIED))))
        for ids in (list[int](tokenizer(text)["input_ids"]) for text in texts):
            if not all(map(is_special, ids)):
                return cls(tuple(takewhile(is_special, ids)), tuple(takewhile(is_special, reversed(ids)))[::-1])
        return cls((), ())

    def begins(self, ids: Sequence[int]) -> bool:
        """Return whether the tokens begin with the start tokens that the tokenizer adds to every text."""
        return tuple(ids[: len(self.start)]) == self.start


class Disguise:
    """Replaces the characters of special tokens by private code points, and restores them."""

    def __init__(self, pattern: re.Pattern[str], texts: str) -> None:
        self._pattern = pattern
        letters = sorted({letter for found in pattern.findall(texts) for letter in found})
        first = _free(texts, len(letters))
        self._away = {ord(letter): first + number for number, letter in enumerate(letters)}
        self._back = {sign: letter for letter, sign in self._away.items()}

    def on(self, value: Any) -> Any:
        """Disguise the special tokens in a text, or in the texts of JSON lists and objects."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: found[0].translate(self._away), value) if self._away else value
        if isinstance(value, dict):
            return {self.on(key): self.on(one) for key, one in value.items()}
        return [self.on(one) for one in value] if isinstance(value, list) else value

    def off(self, text: str) -> str:
        """Return the original text."""
        return text.translate(self._back) if self._back else text


def _free(text: str, count: int) -> int:
    """Return the first of `count` consecutive private code points that do not occur in the text."""
    taken = sorted({ord(letter) for letter in text if ord(letter) in _PRIVATE})
    first = _PRIVATE.start
    while (at := bisect(taken, first - 1)) < len(taken) and taken[at] < first + count:
        first = taken[at] + 1
    return first


def _with_signs(text: str, signs: dict[str, str]) -> str:
    """Replace every control token by its sign, which has the same length."""

    def parts() -> Iterator[str]:
        done = 0
        for start, end in text.control if isinstance(text, Written) else ():
            yield text[done:start]
            yield signs.get(text[start:end], text[start:end])
            done = end
        yield text[done:]

    return "".join(parts())


@lru_cache(maxsize=4)
def _renamed(backend: str, first: int, names: tuple[str, ...]) -> Tokenizer:
    """Return a tokenizer with renamed special tokens, so that it reads their original names as text.

    Not recognising them is not enough: a Unigram model has them in its vocabulary, where they would be chosen as
    pieces of words, and a BPE model may have merges that produce them.
    """
    content = json.loads(backend)
    signs = {name: chr(first + number) * len(name) for number, name in enumerate(names)}
    for token in content["added_tokens"]:
        if token["content"] in signs:
            token |= {"content": signs[token["content"]], "special": False, "normalized": False}
    model = content["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {signs.get(piece, piece): number for piece, number in model["vocab"].items()}
    else:
        model["vocab"] = [[signs.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not _touches(pair, signs)]
    if model.get("unk_token") in signs:
        model["unk_token"] = signs[model["unk_token"]]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.no_padding()
    return tokenizer


def _touches(pair: Any, signs: dict[str, str]) -> bool:
    left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
    return not signs.keys().isdisjoint((left, right, left + right))
