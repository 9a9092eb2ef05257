"""Using trained models: generate, score, compare, evaluate, chat."""
