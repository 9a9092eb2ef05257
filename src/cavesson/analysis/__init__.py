"""What `cavesson.open` returns: the record of a run with its findings, charts and comparisons."""

from cavesson.analysis.run import RunAnalysis, open

__all__ = ["RunAnalysis", "open"]
