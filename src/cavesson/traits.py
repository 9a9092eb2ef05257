"""What an algorithm says of itself: rules, checks, plan and pages ask this, and never which algorithm it is."""

from typing import Literal, NamedTuple


class Traits(NamedTuple):
    """What is true of an algorithm with its settings. run.json has it, for readers that do not know the algorithm."""

    samples: bool = True
    """it learns from responses that the policy samples; otherwise from given examples"""
    grouped: bool = False
    """an advantage compares a response with the others to the same prompt, so that equal rewards teach nothing"""
    relative: bool = False
    """an advantage is a reward minus the mean of its group or of the step, in units that group or step share"""
    clipped: bool = False
    """the loss clips the ratio π/π_old; `policy/clip_fraction` is the share of the tokens where it does"""
    ratio: Literal["token", "sequence", "response"] | None = None
    """what has a ratio π/π_old in the loss: a token, a response as the geometric mean of its tokens (GSPO), or a whole
    response; None = no ratio"""
    critic: bool = False
    """advantages follow from the returns that a critic expects"""
    kl_place: Literal["reward", "loss"] | None = None
    """where β · KL goes; None = no KL penalty, and `kl.coef` has no effect"""
    length_normalised: bool = False
    """the loss of a response is divided by its own length"""
    classifier: bool = False
    """the trained model is a sequence classifier; otherwise it is a causal language model"""
