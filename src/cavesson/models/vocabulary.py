"""Whether two models read and write the same tokens."""

from torch import nn

from cavesson.errors import UserError
from cavesson.models.parts import embedding_rows
from cavesson.models.settings import StartSettings
from cavesson.models.trained import load_start_tokenizer


def check_vocabulary(
    other: nn.Module, name: str, start: StartSettings, policy: nn.Module, policy_start: StartSettings
) -> None:
    """Check that another model, which the message calls `name`, has the tokens of the policy.

    Raises:
        UserError: a token of the policy is missing, or is another token there.
    """
    mine, theirs = _tokens(policy_start), _tokens(start)
    rows = embedding_rows(other)
    if mine is None or theirs is None:
        agree = rows == embedding_rows(policy)
    else:
        same = all(theirs.get(number, token) == token for number, token in mine.items())
        agree = same and max(mine, default=0) < rows
    if not agree:
        raise UserError(f"the {name} {start.path} has a different vocabulary from the policy {policy_start.path}")


def _tokens(start: StartSettings) -> dict[int, str] | None:
    """Return the tokens of a tokenizer by their ids without added ones, or None if the model has no tokenizer."""
    try:
        tokenizer = load_start_tokenizer(start)
    except UserError:  # the folder of a model object, for example, need not have one
        return None
    added = tokenizer.added_tokens_decoder
    return {number: token for token, number in tokenizer.get_vocab().items() if number not in added}
