"""Train language models with human feedback, with every token of every rollout on record."""
