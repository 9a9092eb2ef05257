"""A run on a Ray cluster: Ray Train starts its processes; vLLM servers and what calls the rewards are actors."""
