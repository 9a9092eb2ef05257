"""The algorithms, a page each; `cavesson.registry` is the table of them."""
