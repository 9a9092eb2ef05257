"""A whole alignment in one recipe: stages run in order, each continued or skipped depending on its folder."""
