"""Training runs with one fault each, planted where it would occur, and how often the doctor names it."""
