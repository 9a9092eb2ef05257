"""Faults in three small trainers in plain PyTorch, as people write them from papers."""
