"""What the record of a run lacks and its other columns determine."""

from cavesson.doctor.derivation import Derivation
from cavesson.doctor.derive import advantages, critic, endings, penalty, prompts, scores, texts, versions

DERIVATIONS: tuple[Derivation, ...] = (
    prompts.equal_prompts,
    endings.same_texts,
    endings.end_tokens,
    endings.length_limit,
    endings.finish_reasons,
    texts.characters,
    texts.cut_texts,
    versions.policy_versions,
    scores.distance_before_training,
    scores.clipped_at_once,
    scores.movement,
    critic.rewards_whitened,
    penalty.kl_penalty,
    penalty.penalised_advantages,
    critic.discount_and_trace,
    critic.advantages_whitened,
    advantages.of_responses,
)
BY_NAME = {name: one for one in DERIVATIONS for name in one.gives}
