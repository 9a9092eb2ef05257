"""Faults planted in the real code of another trainer: TRL's PPO, GRPO and RLOO."""
