"""The batches that a run learns from: sampled and rewarded when a step asks for them, or ahead of it."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch

from cavesson.data.order import Stream
from cavesson.processes import Processes
from cavesson.train.metrics import Clock
from cavesson.train.rollouts import EVALUATION_STEP, Collector
from cavesson.types import Rollouts


@dataclass(kw_only=True)
class Batches:
    """Samples and rewards a batch when a step takes it, with the weights of that step."""

    collector: Collector
    processes: Processes
    order: Stream[int]
    """of the prompts, by their indices"""
    batch_size: int
    """responses per batch, over all processes"""
    samples_per_prompt: int
    temperature: Callable[[int], float]
    """of sampling, by training step"""
    steps: int
    """of the whole run"""
    prompts_used: int = 0
    """so far in their order"""

    def take(self, step: int, number: int, clock: Clock) -> Rollouts:
        """Return this process's part of a step's batch, after `number` others; all processes must call this together.

        Raises:
            UserError: a reward or a server failed.
        """
        with clock("generate"):
            self.collector.sampler.update_weights(step)
            first = number * self.batch_size
            prompts = self._prompts(self.prompts_used + number * self.prompts_per_batch)
            part = self.processes.agreed(lambda: self._sampled(prompts, step, first, self.temperature(step)))
            self.collector.sampler.sleep()
        with clock("reward"):
            return self.processes.agreed(lambda: self.collector.reward(part))

    def answers(self, collector: Collector, step: int) -> Rollouts:
        """Return this process's part of one response to each of a collector's own prompts, with the weights of a step.

        It depends on nothing but these weights, and later batches do not depend on it. All processes must call this
        together.

        Raises:
            UserError: a reward or a server failed.
        """
        collector.sampler.update_weights(step)
        mine = self.processes.share(len(collector.prompts))
        part = self.processes.agreed(lambda: collector.generate(mine, EVALUATION_STEP, mine))
        collector.sampler.sleep()
        return self.processes.agreed(lambda: self._rewarded_by(collector, part))

    def _rewarded_by(self, collector: Collector, rollouts: Rollouts) -> Rollouts:
        return collector.reward(rollouts)

    def used(self, count: int) -> None:
        """Move on after a step that has used `count` batches."""
        self.prompts_used += count * self.prompts_per_batch

    def finished(self) -> list[Rollouts | None]:
        """Return this process's part of the batches of later steps, None for batches that a process has not finished.

        All processes must call this together.
        """
        return []

    def restore(self, finished: list[Rollouts | None]) -> None:
        """Take over this process's part of the batches that an earlier one has finished ahead."""

    def close(self) -> None:
        """End what samples and rewards, and release the engine."""
        self.collector.close()

    @property
    def prompts_per_batch(self) -> int:
        return self.batch_size // self.samples_per_prompt

    def own(self, rollouts: Rollouts, size: int) -> Rollouts:
        """Return this process's part of rollouts of one or more batches, which are in order of their samples.

        With the same number of processes, it is the part that the process has sampled. A whole batch has `size`
        rollouts.
        """
        share = self.processes.share(size)
        return rollouts.take([row for row, sample in enumerate(rollouts.sample) if sample % size in share])

    def _prompts(self, start: int) -> list[int]:
        """Return the prompts of this process's responses of a batch, whose first prompt is number `start`."""
        prompts = self.order.take(start, self.prompts_per_batch)
        return [prompts[row // self.samples_per_prompt] for row in self.processes.share(self.batch_size)]

    def _sampled(self, prompts: list[int], step: int, first: int, temperature: float) -> Rollouts:
        """Sample this process's responses of a batch, whose first response is number `first` of its step."""
        share = self.processes.share(self.batch_size)
        rows = range(first + share.start, first + share.stop)
        rollouts = self.collector.generate(prompts, step, rows, temperature)
        return rollouts.with_columns(group_in_step=torch.tensor([row // self.samples_per_prompt for row in rows]))


@dataclass(kw_only=True)
class BatchesAhead(Batches):
    """Samples and rewards the batches of the next steps in threads, while the policy is trained.

    A batch is complete when its slowest response is, so long responses are never left out in favour of short ones. One
    thread calls all rewards, batch after batch: a reward need not be safe to call from several.
    """

    ahead: int
    """most batches of later steps at the same time, which bounds the age of their weights in steps"""
    queue: deque[Future[Rollouts] | None] = field(default_factory=deque)
    """this process's part of batches, in the order of their prompts, None for those that have not begun; the first are
    those of the step that takes them"""

    def __post_init__(self) -> None:
        self._sampling, self._rewarding = (
            ThreadPoolExecutor(count, "ahead", begin_thread, (self.processes.device,)) for count in (self.ahead + 1, 1)
        )

    def take(self, step: int, number: int, clock: Clock) -> Rollouts:
        """Return a step's next batch, as `Batches` says, and begin those of later steps."""
        with clock("generate"):
            if number == 0:
                self.collector.sampler.update_weights(step)
            self._begin(step, number)
            mine = self.queue[number]
            assert mine is not None
            part = self.processes.agreed(mine.result)
        # As a part of its step, it is numbered after the parts before it.
        rows = [number * self.batch_size + row for row in self.processes.share(self.batch_size)]
        groups = torch.tensor([row // self.samples_per_prompt for row in rows])
        return replace(part.with_columns(group_in_step=groups), sample=rows)

    def used(self, count: int) -> None:
        super().used(count)
        for _ in range(count):
            self.queue.popleft()

    def finished(self) -> list[Rollouts | None]:
        mine = [one.result() if one is not None and _is_done(one) else None for one in self.queue]
        done = zip(*self.processes.of_all([one is not None for one in mine]), strict=True)
        return [one if all(parts) else None for one, parts in zip(mine, done, strict=True)]

    def restore(self, finished: list[Rollouts | None]) -> None:
        self.queue = deque(None if one is None else _completed(one) for one in finished)

    def close(self) -> None:
        self._rewarding.shutdown(wait=False, cancel_futures=True)
        super().close()
        # A process that exits while one of its threads is inside PyTorch aborts, so this waits for them.
        self._sampling.shutdown(cancel_futures=True)
        self._rewarding.shutdown()

    def _begin(self, step: int, number: int) -> None:
        """Begin the batches that a step and those after it need, unless they have begun."""
        wanted = number + min(self.ahead + 1, self.steps - step)
        self.queue.extend([None] * (wanted - len(self.queue)))
        for place, one in enumerate(self.queue):
            if one is None:
                start = self.prompts_used + place * self.prompts_per_batch
                # If every step uses one batch, this is its step; another step's draws must differ in any case.
                draws = start // self.prompts_per_batch
                temperature = self.temperature(min(step + max(0, place - number), self.steps - 1))
                sampled = self._sampling.submit(self._sampled, self._prompts(start), draws, 0, temperature)
                self.queue[place] = self._rewarding.submit(self._rewarded, sampled)

    def _rewarded_by(self, collector: Collector, rollouts: Rollouts) -> Rollouts:
        return self._rewarding.submit(collector.reward, rollouts).result()

    def _rewarded(self, sampled: Future[Rollouts]) -> Rollouts:
        return self.collector.reward(sampled.result())


def _is_done(one: Future[Rollouts]) -> bool:
    return one.done() and one.exception() is None


def _completed(rollouts: Rollouts) -> Future[Rollouts]:
    one: Future[Rollouts] = Future()
    one.set_result(rollouts)
    return one


def begin_thread(device: torch.device) -> None:
    """Let a new thread use the GPU of this process by default, as the main thread does."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
