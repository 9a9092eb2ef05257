"""Responses of the data in the place of sampled ones: the mix of arXiv:2306.13649, algorithm 1."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cavesson.data.prompts import PromptSet
from cavesson.randomness import Purpose, generator
from cavesson.record.schema import SOURCE_CODES
from cavesson.rollout.episodes import Episode
from cavesson.types import Rollouts


@dataclass(frozen=True)
class Mix:
    """Draws which responses the policy samples, and which the data give.

    The paper draws once per batch; here every response is drawn, so that a step has some of both.
    """

    own_share: float
    """share of the policy's own, 0 to 1"""
    longest: int
    """most tokens of a given response, which is cut there"""
    seed: int

    def answer(self, episodes: Sequence[Episode], prompts: PromptSet, step: int) -> None:
        """End the episodes whose response is not sampled with that of the data.

        The step and the row of an episode determine the draw.
        """
        for episode in episodes:
            if generator(self.seed, Purpose.GIVEN, step, episode.row).random() < self.own_share:
                continue
            given = prompts.responses[episode.index]
            reason = "eos" if len(given.ids) <= self.longest else "length"
            episode.answered(given.prompt, given.ids[: self.longest], given.learn[: self.longest], reason)

    def remarks(self, prompts: PromptSet) -> list[str]:
        """Return a note for the user on responses that are cut."""
        cut = sum(len(one.ids) > self.longest for one in prompts.responses)
        of = f"{cut} of {len(prompts.responses)} responses of the data"
        return [f"{of} are longer than sampling.max_new_tokens = {self.longest}, and cut there"] if cut else []


def is_given(rollouts: Rollouts) -> Tensor:
    """Return which responses the data give, `[B]` bool; the policy has sampled the others."""
    return (rollouts["source"] == SOURCE_CODES["data"]).any(1)


def sampled(rollouts: Rollouts) -> Rollouts:
    """Return the rollouts that the policy has sampled."""
    given = is_given(rollouts)
    return rollouts.take((~given).nonzero().flatten().tolist()) if bool(given.any()) else rollouts
