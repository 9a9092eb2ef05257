"""The maths: pure functions of tensors. Nothing here knows a config, a model or a file."""
