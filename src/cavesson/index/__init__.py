"""The index of a run: derived files that make the board fast. It is rebuilt if missing and never authoritative."""
