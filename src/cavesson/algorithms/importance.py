"""Importance weights for responses whose sampler is not exactly the policy, such as another inference engine."""

from typing import Literal

from pydantic import Field
from torch import Tensor

from cavesson.algorithms.base import RolloutAlgorithm
from cavesson.ops import ratios
from cavesson.processes import Processes
from cavesson.types import Batch

CAP = 2.0
"""Default cap of the weights with vLLM."""


class ImportanceAlgorithm(RolloutAlgorithm):
    """Can weight the loss of every token by how much likelier the policy made it than its sampler."""

    importance: float | None = Field(None, ge=0)
    """cap of the weights π_old/π_sampler of the policy loss, if sampling and scoring differ; 0 = no weights; none = 2
    with sampling.engine "vllm", else 0"""
    importance_level: Literal["token", "sequence"] = "token"
    """what has a weight: a token, or a whole response, whose tokens all get the product of their weights"""
    importance_mode: Literal["truncate", "mask"] = "truncate"
    """what becomes of a weight above the cap: "truncate" = the cap; "mask" = 0, which leaves token or response out"""

    def metrics(self, rollouts: Batch, processes: Processes) -> dict[str, float]:
        """Return the mean of the weights of the step, and the share that is capped."""
        if not self.importance:
            return super().metrics(rollouts, processes)
        ratio, mask = self._ratio(rollouts), rollouts["learned"]
        return super().metrics(rollouts, processes) | {
            "importance/weight_mean": float(processes.mean(self._weight(ratio), mask)),
            "importance/capped": float(processes.mean((ratio >= self.importance).float(), mask)),
        }

    def weighted(self, loss: Tensor, batch: Batch) -> Tensor:
        """Return a policy loss `[B, T]` with each token's weight, or as it is if weights are off."""
        return loss * self._weight(self._ratio(batch)) if self.importance else loss

    def _ratio(self, batch: Batch) -> Tensor:
        """Return π_old/π_sampler `[B, T]` of every token, or of the response that it belongs to."""
        old, sampler = batch["logprob"], batch["sampler_logprob"]
        if self.importance_level == "token":
            return ratios.token_ratio(old, sampler)
        return ratios.response_ratio(old, sampler, batch["learned"])[:, None].expand_as(old)

    def _weight(self, ratio: Tensor) -> Tensor:
        assert self.importance
        weight = ratios.masked_importance if self.importance_mode == "mask" else ratios.truncated_importance
        return weight(ratio, self.importance)
