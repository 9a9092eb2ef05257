"""Faults of tools, environments and episodes, planted in simulated agents whose every token is recorded."""
