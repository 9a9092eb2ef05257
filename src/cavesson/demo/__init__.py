"""The demo: a real model learns with PPO to continue everyday openings in a more positive mood."""
