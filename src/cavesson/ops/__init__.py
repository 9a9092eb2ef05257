"""Mathematics: pure functions that are independent of any config, model or file."""
