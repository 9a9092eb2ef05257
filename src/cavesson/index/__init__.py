"""The index of a run: derived files that make the board fast, rebuilt whenever they are missing; never the truth."""
