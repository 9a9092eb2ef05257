"""The algorithms, with one module each; `cavesson.registry` lists them."""
