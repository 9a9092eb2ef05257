"""A whole alignment in one recipe: its stages one after the other, each continued or skipped as its folder says."""
