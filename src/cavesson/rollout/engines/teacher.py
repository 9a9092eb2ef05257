"""A teacher on vLLM servers, which say how likely it is to have written given tokens."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cavesson.errors import UserError
from cavesson.rollout.engines.settings import VllmSettings
from cavesson.rollout.engines.vllm_client import VllmClient
from cavesson.types import Rollouts

_PIECE = 256
"""Tokens of the vocabulary in one text; servers refuse texts that are longer than what their model reads."""


class TeacherServers:
    """Servers with the same teacher, which score responses at temperature 1."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._client = VllmClient(urls, VllmSettings())

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that the first server has the tokens of the policy: they tokenise texts of all of them alike.

        Raises:
            UserError: it has another vocabulary, or does not answer.
        """
        texts = list(_texts(tokenizer))
        mine = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        if self._client.tokenised(texts) != mine:
            raise UserError(
                f"the teacher on {self._client.servers[0].url} has a different vocabulary from the policy "
                f"{tokenizer.name_or_path}"
            )

    def logprob(self, rollouts: Rollouts) -> Tensor:
        """Return the log-probability `[B, T]` of every learned token under the teacher; 0 elsewhere.

        Raises:
            ServerError: a server failed, or its answer is not what was asked for.
        """
        inside, attended = rollouts["prompt_mask"].bool(), rollouts["attended"].bool()
        prompts = [ids[mask].tolist() for ids, mask in zip(rollouts["prompt_ids"], inside, strict=True)]
        responses = [ids[mask].tolist() for ids, mask in zip(rollouts["response_ids"], attended, strict=True)]
        whole = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        found = torch.zeros_like(rollouts["learned"])
        for row, logprobs in enumerate(self._client.prompt_logprobs(whole, rollouts.sample)):
            found[row, attended[row]] = torch.tensor(logprobs[len(prompts[row]) :], dtype=found.dtype)
        return found * rollouts["learned"]

    def close(self) -> None:
        """Cancel all requests. May be called from any thread."""
        self._client.close()


def _texts(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield texts that have, between them, every token that is text."""
    tokens = tokenizer.batch_decode([[number] for number in range(len(tokenizer))], skip_special_tokens=True)
    for start in range(0, len(tokens), _PIECE):
        yield "\n".join(tokens[start : start + _PIECE])
