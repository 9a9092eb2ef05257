"""Predictions of a run's memory and time, made from its settings before it starts."""
