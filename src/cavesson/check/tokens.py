"""Checks that tokenizer, model, chat template and limits fit together."""

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from cavesson.algorithms.judged import turn_end
from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.findings.finding import Finding, Results
from cavesson.findings.settings import END_TOKENS
from cavesson.models.parts import position_limit


def check_tokens(
    settings: RolloutRun | ExampleRun, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, longest: int
) -> Results:
    """Check the tokenizer against the model, whose longest sequence in the run has `longest` tokens."""
    yield from _vocabulary(tokenizer, config)
    yield from _end(settings, tokenizer, config)
    yield from _padding(tokenizer)
    yield from _positions(config, longest)


def _vocabulary(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> Results:
    tokens, rows = len(tokenizer), config.get_text_config().vocab_size
    yield Finding(
        "vocabulary",
        "error",
        "The tokenizer has tokens that the model does not know",
        f"The model has embeddings for {rows:,} tokens, the tokenizer has {tokens:,}: it belongs to another model.",
        "model.path: a folder whose tokenizer belongs to its weights",
        tokens,
        f"tokens of the tokenizer; at most the model's {rows:,}",
    ).unless(tokens <= rows)


def _end(settings: RolloutRun | ExampleRun, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> Results:
    """Check that a response can end, and that the end of a chat turn ends it (rows 64 to 66 of the diagnosis)."""
    given = settings.sampling.eos_token_ids if isinstance(settings, RolloutRun) else ()
    of_config = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    known = {int(i) for i in given or (*of_config, tokenizer.eos_token_id) if i is not None}
    if known:
        yield from turn_end(settings, tokenizer, known)
        return
    yield Finding(
        "end-token",
        "error",
        "No response can end",
        "Neither the tokenizer nor the model's config has an end token: every response is cut at the length limit.",
        "sampling.eos_token_ids = [ID]",
        "none",
        END_TOKENS,
        "TRL PR #7039",
    )


def _padding(tokenizer: PreTrainedTokenizerBase) -> Results:
    pad, unknown = tokenizer.pad_token, tokenizer.unk_token
    yield Finding(
        "padding",
        "warning",
        "Padding looks like unknown text",
        f"{pad} marks both padding and text that the tokenizer does not know; a reward model finds the end of a text "
        "by its padding.",
        "set tokenizer.pad_token to the end token or to another special token",
        str(pad),
        "the padding token: a special token other than the unknown token. It may be the end token, because masks mark "
        "padding",
        "arXiv:2403.17031",
    ).unless(pad is None or pad != unknown or pad == tokenizer.eos_token)


def _positions(config: PretrainedConfig, longest: int) -> Results:
    most = position_limit(config)
    if most is None:
        return
    yield Finding(
        "positions",
        "error",
        "Sequences are longer than the model can read",
        f"Prompt and response together may have {longest:,} tokens; the model knows {most:,} positions.",
        "a smaller data.max_prompt_tokens, sampling.max_new_tokens or data.max_length",
        longest,
        f"tokens of the longest sequence; at most the model's {most:,}",
    ).unless(longest <= most)
