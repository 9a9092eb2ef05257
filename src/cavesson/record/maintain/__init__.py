"""Keep a record fast: merge its small segments into large ones."""
