"""Where a response ends when a text such as "###Human" ends it."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class StopTexts:
    """Finds stop texts in growing responses and says at which token to cut.

    Args:
        tokenizer: turns ids into text; special tokens are not part of it.
        stop: the texts; empty means nothing ever stops.

    Raises:
        UserError: a stop text is a special token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        # Special tokens are no part of the text: they are found by their ids.
        self.special = {special[text] for text in stop if text in special}
        self.stop = tuple(text for text in stop if text not in special)
        # A stop text of n bytes is spread over at most n tokens; a few more give a split character its other half.
        self._tail = max((len(text.encode()) for text in self.stop), default=0) + 4

    def cut(self, ids: Sequence[int]) -> int | None:
        """The number of tokens that lie wholly before the earliest stop text, or None if there is none.

        To be called after every new token: a stop text further back than its own length is not looked for.
        """
        if ids and ids[-1] in self.special:
            return len(ids) - 1
        if not self.stop or self._find(ids[-self._tail :]) is None:
            return None
        start = self._find(ids)
        assert start is not None
        # Decoded prefixes only grow, so the last prefix that ends before the stop text is found from the end.
        return next(n for n in range(len(ids), -1, -1) if len(self._decode(ids[:n])) <= start)

    def _find(self, ids: Sequence[int]) -> int | None:
        text = self._decode(ids)
        return min((at for at in (text.find(stop) for stop in self.stop) if at >= 0), default=None)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
