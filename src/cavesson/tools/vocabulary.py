"""The vocabulary of a model, which makes the token ids of an import readable."""

from cavesson.importers import Tokenizer
from cavesson.models.load import load_tokenizer


def vocabulary_of(path: str) -> Tokenizer:
    """Return the vocabulary of a model, given by a folder or Hub name; raise a UserError if it has no tokenizer."""
    tokenizer = load_tokenizer(path)
    ids = list(range(len(tokenizer)))
    tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(ids)]
    return Tokenizer(tokens, tokenizer.batch_decode([[i] for i in ids]), lambda ids: str(tokenizer.decode(list(ids))))
