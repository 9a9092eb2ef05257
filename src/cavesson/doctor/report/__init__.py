"""A diagnosis as terminal output, JSON or an HTML page."""
