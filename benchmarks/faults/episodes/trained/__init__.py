"""Faults of tools, environments and episodes, planted in real training of a tiny model."""
