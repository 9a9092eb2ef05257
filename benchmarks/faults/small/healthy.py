"""Runs without a fault: other settings, tasks and rewards, all of them fine."""

from collections.abc import Callable
from typing import Any

from benchmarks.faults.small.plan import Plan
from benchmarks.faults.small.tasks import WORDS


def usual(plan: Plan) -> None:
    """The trainer's own settings."""


def rate_low(plan: Plan) -> None:
    """A fifth of the learning rate: little happens."""
    plan.scale("rate", 0.2)


def rate_higher(plan: Plan) -> None:
    """Twice the learning rate, which works as well."""
    plan.scale("rate", 2.0)


def no_penalty(plan: Plan) -> None:
    """No KL penalty."""
    plan.set("penalty", 0.0)


def penalty_strong(plan: Plan) -> None:
    """Five times the KL penalty."""
    plan.scale("penalty", 5.0)


def eight_steps(plan: Plan) -> None:
    """Eight steps only."""
    plan.settings["steps"] = 8


def sparse(plan: Plan) -> None:
    """A reward that few responses get, of a model that has seen few demonstrations."""
    plan.training = 300
    enough = 3.0 if plan.task.name == "sentences" else 1.0
    plan.judge(lambda score, question, answer: float(score >= enough))


def saturated(plan: Plan) -> None:
    """A reward that nine of ten responses get at the start, and soon nearly all: for avoiding a word."""
    plan.judge(lambda score, question, answer: float(WORDS[plan.task.name] not in answer))


def four_prompts(plan: Plan) -> None:
    """Only four different prompts."""
    plan.task.questions = plan.task.draw(4)


def several_epochs(plan: Plan) -> None:
    """Four passes over each batch, at half the rate; the trainer without ratios takes half-size steps."""
    plan.scale("rate", 0.5)
    names = {"group_relative": "num_iterations", "actor_critic": "epochs"}
    if plan.trainer in names:
        plan.settings[names[plan.trainer]] = 4


def long_answers(plan: Plan) -> None:
    """Twice the room for a response."""
    plan.task.limit *= 2


def length_favoured(plan: Plan) -> None:
    """The task truly favours length: each token of a right or half-right response earns a little more."""
    plan.judge(lambda score, question, answer: score + 0.1 * min(len(plan.task.split(answer)), 12) * (score > 0))


def cooler(plan: Plan) -> None:
    """Sampled and scored at temperature 0.8."""
    plan.set("temperature", 0.8)


def large_groups(plan: Plan) -> None:
    """Four prompts with sixteen responses each; for the critic, eight responses to each prompt."""
    plan.settings |= {
        "group_relative": {"prompts": 4, "group": 16},
        "reinforce": {"n_prompts": 4, "k": 16},
        "actor_critic": {"samples": 8},
    }[plan.trainer]


def pairs(plan: Plan) -> None:
    """Two responses to each prompt."""
    plan.settings |= {
        "group_relative": {"prompts": 32, "group": 2},
        "reinforce": {"n_prompts": 32, "k": 2},
        "actor_critic": {"samples": 2},
    }[plan.trainer]


def whole_batch(plan: Plan) -> None:
    """The baseline is the mean of the batch; for the critic, λ = 1."""
    plan.settings |= {"lam": 1.0} if plan.trainer == "actor_critic" else {"whole_batch": True}


def not_divided(plan: Plan) -> None:
    """Advantages are not divided by a standard deviation; the critic's discount is 0.99."""
    plan.settings |= {
        "group_relative": {"scale_by_std": False},
        "reinforce": {"normalise": False},
        "actor_critic": {"gamma": 0.99},
    }[plan.trainer]


def warm_up(plan: Plan) -> None:
    """The learning rate rises over ten steps."""
    plan.settings["warmup"] = 10


def below_zero(plan: Plan) -> None:
    """The same reward minus two: never positive at first."""
    plan.judge(lambda score, question, answer: score - 2)


def tenfold(plan: Plan) -> None:
    """The same reward times ten; where advantages are not normalised by it, with ten times the penalty."""
    plan.judge(lambda score, question, answer: 10 * score)
    if plan.trainer == "actor_critic":
        plan.scale("penalty", 10.0)


def step_behind(plan: Plan) -> None:
    """The sampler gets new weights at every second step, and the version is recorded."""
    plan.set("sync", 2)


def continued(plan: Plan) -> None:
    """The run continues another one: its first step is number 100."""
    plan.first_step = 100


def exploring(plan: Plan) -> None:
    """A small entropy bonus."""
    plan.set("entropy", 0.003)


KINDS = (
    usual, rate_low, rate_higher, no_penalty, penalty_strong, eight_steps, sparse, saturated, four_prompts,
    several_epochs, long_answers, length_favoured, cooler, large_groups, pairs, whole_batch, not_divided, warm_up,
    below_zero, tenfold, step_behind, continued, exploring,
)  # fmt: skip
HEALTHY: dict[str, Callable[[Plan], Any]] = {one.__name__.replace("_", "-"): one for one in KINDS}
