"""Faults of sampling: responses are not drawn from the distribution that is scored."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.faults.others.fault import BOARD, COMPLETIONS, RECORDER, TOKENS, fault
from benchmarks.faults.others.plan import Plan
from benchmarks.faults.others.world import GROUP

FORBIDDEN = 18
"""Tokens before which no response may end."""
TOO_SHORT = 12
"""A limit one token below that of the shortest good response."""
SYNC = 8
"""Steps from one synchronisation of the sampler to the next."""


def sample_with(plan: Plan, **changes: Any) -> None:
    """Change the settings of the sampler, which the scoring does not hear of."""
    if plan.trainer != "ppo":
        plan.at_onset(lambda trainer: [setattr(trainer.generation_config, *change) for change in changes.items()])
        return

    def changed(config: Any) -> Any:
        if not plan.on() or config.temperature < 0.1:  # the almost greedy samples for the table are left alone
            return config
        config = copy.deepcopy(config)
        config.update(**changes)
        return config

    given = "generation_config=generation_config"
    plan.replace("generate", given, "generation_config=changed(generation_config)", changed=changed)


def _score_unfiltered(plan: Plan) -> None:
    """Let PPO score the logits of the model; it takes those that the sampler has filtered and divided."""
    if plan.trainer == "ppo":
        plan.replace("generate", "output_scores=True", "output_scores=True, output_logits=True")
        plan.swap("generate", "output.scores", "output.logits")


@fault(
    causes=["filtered-sampling"],
    also=["negative-kl", "temperature-missing", "sampler-mismatch", "entropy-collapse"],
    # Without entropies, filtered samples look like those of a more certain model.
    seen={"ppo": [], "grpo": [RECORDER], "rloo": [RECORDER]},
)
def sampling_filtered(plan: Plan) -> None:
    """Sampled with top-k 8, scored without."""
    sample_with(plan, top_k=8)
    _score_unfiltered(plan)


@fault(
    causes=["temperature-missing"],
    also=["negative-kl", "filtered-sampling", "sampler-mismatch", "entropy-collapse"],
    seen={"ppo": [], "grpo": [RECORDER], "rloo": [RECORDER]},
)
def sampling_cooler(plan: Plan) -> None:
    """Sampled at temperature 0.6, scored at 1."""
    sample_with(plan, temperature=0.6)
    _score_unfiltered(plan)


@fault(
    causes=["end-forbidden"],
    also=["negative-kl", "truncated", "ratio-not-one", "kl-at-start"],
    # Texts that are never short may be what was asked for.
    seen=TOKENS,
)
def end_forbidden(plan: Plan) -> None:
    """No response may end before its 18th token."""
    sample_with(plan, min_new_tokens=FORBIDDEN)


@fault(causes=["truncated", "never-ends"], also=["false-truncation"], seen=[RECORDER, BOARD, COMPLETIONS])
def limit_short(plan: Plan) -> None:
    """The limit of a response is one token below what a good one needs."""
    plan.settings["response_length" if plan.trainer == "ppo" else "max_completion_length"] = TOO_SHORT


@fault(causes=["same-seed"], seen=[RECORDER, BOARD, COMPLETIONS], trainers=["grpo", "rloo"])
def siblings_alike(plan: Plan) -> None:
    """Two processes have the same seed: half of a group repeats the other half."""

    def repeat(trainer: Any) -> None:
        original = trainer._generate_single_turn

        def generate(*given: Any, **more: Any) -> Any:
            found = original(*given, **more)
            ids = found[0] if isinstance(found, tuple) else found
            for row in range(len(ids)):
                if row % GROUP >= GROUP // 2:
                    ids[row] = ids[row - GROUP // 2]
            return found

        trainer._generate_single_turn = generate

    plan.at_onset(repeat)


@fault(
    causes=["sampler-stale", "sampler-mismatch"],
    also=["too-off-policy", "mismatch-growing"],
    seen=[RECORDER],
    trainers=["grpo", "rloo"],
)
def sampler_stale(plan: Plan) -> None:
    """The sampler gets the policy's weights at every eighth step only."""
    behind: dict[str, Any] = {}

    def make(trainer: Any) -> None:
        from transformers import AutoModelForCausalLM

        behind["model"] = AutoModelForCausalLM.from_pretrained(plan.world.policy).eval()

    @contextmanager
    def unwrap(original: Any, *given: Any, **more: Any) -> Iterator[Any]:
        with original(*given, **more) as model:
            sampler = behind["model"]
            if plan.object.state.global_step % SYNC == 0:
                sampler.load_state_dict(model.state_dict())
            sampler.generation_config = model.generation_config
            yield sampler

    plan.built.append(make)
    plan.wrap("unwrap_model_for_generation", unwrap)
