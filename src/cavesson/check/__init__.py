"""What will go wrong in a run, said before it starts."""
