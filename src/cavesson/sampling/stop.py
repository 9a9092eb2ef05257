"""Ending a response at a stop text such as "###Human"."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class StopTexts:
    """Finds stop texts in growing responses and determines at which token to cut.

    Args:
        tokenizer: decodes ids to text, from which special tokens are omitted.
        stop: the stop texts; if empty, no response is ever cut.

    Raises:
        UserError: a stop text is a special token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        # Special tokens are not part of the decoded text, so they are found by their ids.
        self.special = {special[text] for text in stop if text in special}
        self.stop = tuple(text for text in stop if text not in special)
        # A stop text of n bytes spans at most n tokens; a few more complete a character that is split between tokens.
        self._tail = max((len(text.encode()) for text in self.stop), default=0) + 4

    def cut(self, ids: Sequence[int]) -> int | None:
        """Return the number of tokens that lie entirely before the earliest stop text, or None if there is none.

        Call this after every new token: a stop text that does not reach into the most recent tokens is not found.
        """
        if ids and ids[-1] in self.special:
            return len(ids) - 1
        if not self.stop or self._find(ids[-self._tail :]) is None:
            return None
        start = self._find(ids)
        assert start is not None
        # Decoded prefixes only grow, so searching from the end finds the longest prefix that ends before the stop text.
        return next(n for n in range(len(ids), -1, -1) if len(self._decode(ids[:n])) <= start)

    def _find(self, ids: Sequence[int]) -> int | None:
        text = self._decode(ids)
        return min((at for at in (text.find(stop) for stop in self.stop) if at >= 0), default=None)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
