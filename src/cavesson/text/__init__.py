"""Functions for texts that need no model: statistics, counting, quoting and safe display."""
