"""Read a record: runs, steps and rollouts, queries, and what is new since the last look."""
