"""Other tools that get the numbers of a run."""
