"""Integrations with other tools: recorders for other trainers, and trackers that receive the metrics of a run."""
