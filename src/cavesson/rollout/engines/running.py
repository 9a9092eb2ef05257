"""Rows of a batch that are sampled together, and the tokens drawn for them."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from cavesson.rollout.engines.decoder import Decoder
from cavesson.rollout.engines.distribution import NextTokens, filters_of, next_tokens
from cavesson.rollout.engines.kept import ReadRow
from cavesson.rollout.engines.responses import Growing
from cavesson.rollout.engines.settings import DecodingSettings


class Running:
    """Draws a token for each row at every step.

    A draw uses the random number of its response and position in `uniforms`, `[N, T]`, so it does not depend on the
    other rows. `growing` are all responses, those of waiting prompts included; `responses` has the index of each row's
    response.
    """

    def __init__(
        self,
        decoder: Decoder,
        growing: Growing,
        uniforms: Tensor,
        eos: Tensor,
        settings: DecodingSettings,
        responses: Sequence[int],
        draw: NextTokens = next_tokens,
    ) -> None:
        self._decoder, self._growing, self._eos, self._filters = decoder, growing, eos, filters_of(settings)
        self._next_tokens = draw
        # One more position than a response can have, for what is drawn in rows that have ended.
        self._uniforms = pad(uniforms, (0, 1)).to(eos.device)
        self.logprobs = torch.zeros(self._uniforms.shape, device=eos.device)
        """`[N, T + 1]`, of the drawn tokens"""
        self.responses = list(responses)
        """the index of each row's response"""
        self._index = self._tensor(self.responses)
        self._count = torch.zeros_like(self._index)  # tokens drawn before, for each row
        self._token = self._draw(self._index, self._count, decoder.read())
        growing.append(self.responses, self._token.tolist())

    def left(self) -> list[int]:
        """Return the rows that have not ended."""
        return [row for row, response in enumerate(self.responses) if not self._growing.reasons[response]]

    def ended(self) -> list[int]:
        """Return the rows that have ended."""
        return [row for row, response in enumerate(self.responses) if self._growing.reasons[response]]

    def read(self, prompts: Sequence[Sequence[int]], names: Sequence[int]) -> dict[int, ReadRow]:
        """Return what was read of the rows that have ended, by the names of their responses, if these have any."""
        if not names:
            return {}
        responses = [(row, self.responses[row]) for row in self.ended()]
        return {names[i]: self._decoder.row(row, [*prompts[i], *self._growing.ids[i]]) for row, i in responses}

    def step(self, times: int = 1) -> None:
        """Append the last token of each row and draw the next one, several times before any of them is looked at.

        A row that ends meanwhile goes on until all these steps are made, and what is drawn for it is not used.
        """
        drawn = []
        for _ in range(times):
            self._count += 1
            self._token = self._decoder.append(self._token, lambda logits: self._draw(self._index, self._count, logits))
            drawn.append(self._token.clone())  # a graph's next step overwrites it
        for tokens in torch.stack(drawn).tolist():
            self._growing.append(self.responses, tokens)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        kept = self._tensor(rows)
        self.responses = [self.responses[row] for row in rows]
        self._index, self._count, self._token = self._index[kept], self._count[kept], self._token[kept]
        self._decoder.keep(kept)

    def replace(self, rows: Sequence[int], responses: Sequence[int], ids: Tensor, mask: Tensor) -> None:
        """Begin other responses in rows that have ended, and draw their first tokens.

        The prompts of the responses, `ids` `[K, S]`, are padded on the left, where `mask` is 0.
        """
        for row, response in zip(rows, responses, strict=True):
            self.responses[row] = response
        places, index = self._tensor(rows), self._tensor(responses)
        self._index[places], self._count[places] = index, 0
        first = self._draw(index, self._count[places], self._decoder.replace(places, ids, mask))
        self._token[places] = first
        self._growing.append(responses, first.tolist())

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, device=self._eos.device)

    def _draw(self, index: Tensor, count: Tensor, logits: Tensor) -> Tensor:
        """Draw a token from each row's logits `[B, V]`, and note its log-probability in the response of that index."""
        at = count.clamp_max(self._uniforms.shape[1] - 1)
        token, logprob = self._next_tokens(logits, self._uniforms, index, at, self._eos, self._filters)
        self.logprobs[index, at] = logprob
        return token
