"""The reward of recipe.toml."""


def reward(prompts: list[str], responses: list[str], topic: list[str], **columns: list[object]) -> list[float]:
    """Return a number for every response: here, lower-case letters are polite.

    Args:
        prompts: the texts that the model got.
        responses: what it wrote, one for each prompt.
        topic: a column of prompts.jsonl; every column of the data comes under its name.
        columns: the others.
    """
    return [sum(letter.islower() for letter in response) / max(1, len(response)) for response in responses]
