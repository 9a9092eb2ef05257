"""Runs on a Ray cluster: Ray Train starts the learners; vLLM servers and reward workers are actors."""
