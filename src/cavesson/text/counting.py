"""Counts with singular and plural nouns."""


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 step", "2 steps", "0 steps"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
