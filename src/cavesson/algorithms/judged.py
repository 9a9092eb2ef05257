"""What is wrong with the settings of a run that samples, as far as these alone say."""

from collections.abc import Collection

from transformers import PreTrainedTokenizerBase

from cavesson.algorithms.runs import RolloutRun, RunSettings
from cavesson.data.view import assistant_turn_end
from cavesson.findings import settings as judge
from cavesson.findings.finding import Results


def judged(settings: RolloutRun) -> Results:
    """Judge what is sampled, and where the KL penalty and the reward go."""
    sampling, coef, use = settings.sampling, settings.kl_coef, settings.kl_use
    yield judge.filtered_sampling(sampling.model_dump(), coef, has_reference=settings.reference.kind != "none")
    yield judge.temperature_missing(sampling.temperature, settings.scoring_temperature, coef)
    yield judge.stale_sampling(sampling.max_staleness, getattr(settings.algorithm, "importance", None))
    if coef and use is not None:
        yield judge.estimator_misplaced(use.place, use.estimator)
    if settings.credit_decay is not None:
        yield judge.reward_fades(settings.credit_decay, settings.longest_episode, f"{settings.section}.lam")


def turn_end(settings: RunSettings, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> Results:
    """Judge whether the token that ends a turn of the chat template is among those that end a response."""
    token = assistant_turn_end(settings.data, tokenizer)
    if token is not None:
        text, names = (", ".join(map(str, tokenizer.convert_ids_to_tokens(ids))) for ids in ([token], sorted(ends)))
        yield judge.turn_continues(token, text, ends, names, samples=isinstance(settings, RolloutRun))
