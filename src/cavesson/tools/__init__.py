"""What is done with trained models: score, compare, evaluate, chat."""
