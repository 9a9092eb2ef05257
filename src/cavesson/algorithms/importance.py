"""Importance weights for responses whose sampler is not exactly the policy, such as another inference engine."""

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
    """weight a token's loss by min(π_old/π_sampler, this), if sampling and scoring differ; 0 = off; none = 2 with
    sampling.engine "vllm", else off"""

    def metrics(self, rollouts: Batch, processes: Processes) -> dict[str, float]:
        """Return the mean of the weights of the step, and the share that is capped."""
        if not self.importance:
            return super().metrics(rollouts, processes)
        weight, mask = ratios.truncated_importance(*_logprobs(rollouts), self.importance), rollouts["learned"]
        return super().metrics(rollouts, processes) | {
            "importance/weight_mean": float(processes.mean(weight, mask)),
            "importance/capped": float(processes.mean((weight >= self.importance).float(), mask)),
        }

    def weighted(self, loss: Tensor, batch: Batch) -> Tensor:
        """Return a policy loss `[B, T]` with each token's weight, or as it is if weights are off."""
        return loss * ratios.truncated_importance(*_logprobs(batch), self.importance) if self.importance else loss


def _logprobs(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch["logprob"], batch["sampler_logprob"]
