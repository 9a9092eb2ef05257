"""Checks of a recipe or a reward before a run starts."""
