"""Consequences that many rules have in common; findings of these rules are folded under their cause."""

CRITIC = ("value-not-fitting", "value-constant", "value-loss-spike")
"""A critic learns from the rewards, so wrong rewards show in its numbers too."""
MISLED = (
    "reward-falls", "kl-explosion", "likelihood-displacement", "length-collapse", "truncated", "distinct-collapse",
    "entropy-explosion", *CRITIC,
)  # fmt: skip
"""A policy that learns from wrong numbers may lose what it could do, slowly."""
RUNAWAY = (
    "pattern-spreading", "zero-variance-groups", "zero-gradient", "verifier-dead", "rollouts-fail", "reward-falls",
    "distinct-collapse", "repetition-loops", "template-collapse", "entropy-collapse", "entropy-explosion",
    "length-collapse", "truncated", "likelihood-displacement", "gradient-spike", "echo-trap", "reward-exhausted",
    "length-bias", *CRITIC,
)  # fmt: skip
"""A policy that diverges shows all of these in its responses and updates."""
MISMATCH = (
    "sampler-mismatch", "mismatch-tail", "mismatch-growing", "mismatch-rare-tokens", "precision-noise", "retokenised"
)  # fmt: skip
"""Sampler and trainer disagree on log-probabilities if one of them is wrong."""
