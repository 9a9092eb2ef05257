"""Recipes from the configurations of TRL 1.16: read them, map every setting, and write the recipe."""
