"""Rollouts: engines that sample, rewards that score, and episodes of many turns with tools and environments."""
