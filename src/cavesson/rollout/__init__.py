"""Rollouts of many turns: tools, environments, and what a chat template adds between the turns."""
