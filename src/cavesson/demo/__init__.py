"""The demo: a real model learns by PPO to continue everyday openings in a brighter mood."""
