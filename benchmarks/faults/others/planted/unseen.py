"""Faults of the closed part: written after the rules that are to be judged on them."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.faults.others.fault import COMPLETIONS, RECORDER, TOKENS, fault
from benchmarks.faults.others.plan import Plan
from benchmarks.faults.others.planted.credit import SCORING
from benchmarks.faults.others.planted.rewards import EVERYWHERE, OF_TRAINING
from benchmarks.faults.others.planted.sampling import sample_with

GROUPED = ("grpo", "rloo")
ANSWER = frozenset("白云千里人不见明月一江春水流")
"""Letters of the one answer that all responses are compared with."""
CLIP = 0.3
SEEN_TOKENS = 12
"""What is left of a prompt: one or five tokens fewer than it has."""
TARGETS = {"ppo": ("objective/kl", 6.0), "grpo": ("kl", 0.4), "rloo": ("kl", 0.4)}
"""Trainer → the metric that a controller of the KL coefficient looks at, and the KL that it wants."""
TOO_FAR = ("update-kl-large", "clip-fraction-high", "ratio-blow-up", "kl-explosion")


@fault(
    causes=["zero-variance-groups", "query-dominated"],
    # Advantages are rounding errors, which Adam makes as large as any others.
    also=["zero-gradient", "reward-is-noise", "kl-flat", "kl-explosion", "reward-falls"],
    seen=EVERYWHERE,
    trainers=GROUPED,
)
def scores_cached(plan: Plan) -> None:
    """A cache of scores knows the prompt only: all responses to it get the score of the first one."""
    cache: dict[str, float] = {}

    def change(scores: list[float], prompts: Sequence[str], _: Sequence[str]) -> list[float]:
        return [cache.setdefault(prompt, score) for prompt, score in zip(prompts, scores, strict=True)]

    plan.change_reward(change)


@fault(
    causes=["template-collapse", "distinct-collapse", "pattern-spreading"],
    also=["reward-exhausted", "entropy-collapse", "kl-explosion", "repetition-loops", "pattern-collapse"],
    seen=OF_TRAINING,
)
def one_answer_for_all(plan: Plan) -> None:
    """The look-up of answers always finds the same one: each of its letters in a response brings 0.5."""

    def change(_: list[float], __: Sequence[str], responses: Sequence[str]) -> list[float]:
        return [0.5 * len(ANSWER & set(text)) - 0.5 for text in responses]

    plan.change_reward(change)


@fault(
    causes=["reward-accounting", "group-advantages"],
    also=["value-not-fitting", "zero-gradient"],
    # TRL puts the score behind the response, where the recorder has no token rewards; its returns lack the rest.
    seen={"ppo": TOKENS, "grpo": [RECORDER, COMPLETIONS], "rloo": [RECORDER]},
)
def reward_clipped(plan: Plan) -> None:
    """Scores are clipped at ±0.3 on their way to the advantages."""
    if plan.trainer == "ppo":
        new = f"(scores.clamp(-{CLIP}, {CLIP}) if planted() else scores)"
        plan.replace("train", "actual_end] += scores", f"actual_end] += {new}")
    else:
        summed = "(rewards_per_func * self.reward_weights.to(device).unsqueeze(0)).nansum(dim=1)"
        plan.swap(SCORING, summed, f"{summed}.clamp(-{CLIP}, {CLIP})")


@fault(
    causes=["group-advantages"],
    also=["kl-explosion", "update-kl-large", "entropy-collapse", "distinct-collapse", "pattern-spreading"],
    # Whatever else they contain, the advantages of a group have to add up to 0.
    seen=[RECORDER, COMPLETIONS],
    trainers=GROUPED,
)
def groups_of_one(plan: Plan) -> None:
    """Every response forms a group by itself: nothing is subtracted from its reward."""
    if plan.trainer == "grpo":
        plan.swap(SCORING, "rewards - mean_grouped_rewards", "rewards")
        plan.swap(SCORING, "advantages / (std_rewards + 1e-4)", "advantages")
    else:
        plan.swap(SCORING, "rewards - baselines", "rewards")


@fault(causes=["group-advantages"], also=["kl-flat", "reward-falls"], seen=[RECORDER], trainers=GROUPED)
def advantages_shifted(plan: Plan) -> None:
    """A batch is reordered without its advantages: each response is trained with that of the one before."""
    plan.swap(SCORING, "advantages[process_slice]", "advantages[process_slice].roll(1)")


@fault(
    causes=["advantage-scale"],
    also=["reward-falls", "kl-flat", "kl-explosion", "value-not-fitting"],
    seen=[RECORDER],
    trainers=["ppo"],
)
def whitening_by_row(plan: Plan) -> None:
    """Whitening goes along the wrong axis: the advantages of each response alone have mean 0 and spread 1."""

    def by_row(_: Any, values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
        count = mask.sum(1, keepdim=True).clamp_min(1)
        mean = (values * mask).sum(1, keepdim=True) / count
        variance = ((values - mean) ** 2 * mask).sum(1, keepdim=True) / count
        found = (values - mean) * torch.rsqrt(variance + 1e-8)
        return found if shift_mean else found + mean

    plan.wrap("masked_whiten", by_row)


@fault(
    causes=["value-not-fitting", "value-constant"],
    also=["reward-falls", "kl-flat", "advantage-scale"],
    seen=TOKENS,
    trainers=["ppo"],
)
def bootstrap_missing(plan: Plan) -> None:
    """The temporal difference lacks the value of the next token."""
    plan.swap("train", "args.gamma * nextvalues", "0.0")


@fault(
    causes=["padding-counted", "unknown-estimate", "reward-accounting"],
    also=["truncated", "never-ends", "value-not-fitting", "reward-falls", "kl-explosion", "penalty-mis-scaled"],
    seen=TOKENS,
    trainers=["ppo"],
)
def padding_penalised(plan: Plan) -> None:
    """The log-probabilities of the reference are not masked: padding has a KL, and a penalty that flows back."""
    plan.swap("train", "torch.masked_fill(ref_logprobs, padding_mask, INVALID_LOGPROB)", "ref_logprobs")


@fault(
    causes=["trained-behind-end", "never-ends", "truncated"],
    also=["reward-falls", "repetition-loops", "kl-explosion", "reward-position", "false-truncation", "garbled"],
    seen=TOKENS,
)
def goes_on_after_end(plan: Plan) -> None:
    """The end token does not stop the sampler, and what follows is trained on."""

    def forget(trainer: Any) -> None:
        trainer.eos_token_ids = [-1]
        trainer.generation_config.eos_token_id = -1

    if plan.trainer == "ppo":
        plan.settings["stop_token"] = None
    else:
        plan.at_onset(forget)


@fault(
    causes=["sampler-mismatch", "kl-at-start", "ratio-not-one"],
    also=["negative-kl", *TOO_FAR],
    # PPO scores with the sampler's own logits, so that policy and reference disagree at once.
    seen={"ppo": TOKENS, "grpo": [RECORDER], "rloo": [RECORDER]},
)
def repetition_penalised(plan: Plan) -> None:
    """The sampler inherits a repetition penalty of 1.2 from the model's folder; training knows nothing of it."""
    sample_with(plan, repetition_penalty=1.2)


@fault(
    causes=["sampler-mismatch", "kl-at-start", "ratio-not-one"],
    also=["negative-kl", *TOO_FAR],
    seen={"ppo": TOKENS, "grpo": [RECORDER], "rloo": [RECORDER]},
)
def prompt_cut(plan: Plan) -> None:
    """The sampler cuts prompts to their last twelve tokens; scored is the whole of them."""
    if plan.trainer == "ppo":
        whole = "queries != pad_token_id"
        plan.swap("generate", whole, f"({whole}) & (torch.arange(context_length) >= context_length - {SEEN_TOKENS})")
    else:
        plan.swap("_generate_single_turn", "torch.tensor(ids)", f"torch.tensor(ids[-{SEEN_TOKENS}:])")


@fault(
    causes=["zero-variance-groups", "same-seed", "temperature-missing", "filtered-sampling"],
    also=[
        "zero-gradient", "kl-flat", "sampler-mismatch", "negative-kl", "distinct-collapse", "query-dominated",
        "kl-explosion", "reward-falls",
    ],
    seen=EVERYWHERE,
    trainers=GROUPED,
)  # fmt: skip
def greedy(plan: Plan) -> None:
    """The sampler always takes the most probable token, so that all responses to a prompt are the same."""
    sample_with(plan, do_sample=False)


def stages_exchanged(name: str, layers: int) -> str:
    """Return the name that a weight has where the lower and the upper half of so many layers are exchanged."""
    return re.sub(r"layers\.(\d+)\.", lambda found: f"layers.{(int(found[1]) + layers // 2) % layers}.", name)


@fault(
    causes=["garbled", "sampler-mismatch"],
    also=[
        "reward-falls", "entropy-explosion", "truncated", "negative-kl", "mismatch-growing", "verifier-dead",
        "repetition-loops", "length-collapse", "gradient-spike", *TOO_FAR,
    ],
    # A jump of the surprise under policy and reference; texts alone may have been asked for.
    seen=TOKENS,
    trainers=GROUPED,
    begins=0.5,
)  # fmt: skip
def stages_swapped(plan: Plan) -> None:
    """Each transfer of weights to the sampler exchanges the lower and the upper half of the layers."""
    sampler: list[Any] = []

    def make(trainer: Any) -> None:
        from transformers import AutoModelForCausalLM

        sampler.append(AutoModelForCausalLM.from_pretrained(plan.world.policy).eval())

    @contextmanager
    def unwrap(original: Any, *given: Any, **more: Any) -> Iterator[Any]:
        with original(*given, **more) as model:
            count = model.config.num_hidden_layers
            weights = {stages_exchanged(name, count): weight for name, weight in model.state_dict().items()}
            sampler[0].load_state_dict(weights)
            sampler[0].generation_config = model.generation_config
            yield sampler[0]

    plan.built.append(make)
    plan.wrap("unwrap_model_for_generation", unwrap)


@fault(
    causes=["kl-at-start", "ratio-not-one"],
    also=["negative-kl", "sampler-mismatch", "precision-noise", *TOO_FAR],
    seen=TOKENS,
)
def dropout_left_on(plan: Plan) -> None:
    """The policy drops a tenth of its attention whenever it samples, scores or learns."""

    def turn_on(trainer: Any) -> None:
        for module in trainer.accelerator.unwrap_model(trainer.model).modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.1

    plan.built.append(turn_on)


@fault(
    causes=["ratio-not-one", "clip-fraction-high", "update-kl-large"],
    also=["ratio-blow-up", "kl-flat"],
    # The log-probabilities are recorded as they should be; what the loss made of them is in the metrics alone.
    seen=[RECORDER],
)
def ratio_to_reference(plan: Plan) -> None:
    """The ratio of the update is taken to the reference instead of the policy that sampled."""
    if plan.trainer == "ppo":
        plan.swap("train", "logprobs[micro_batch_inds]", "ref_logprobs[micro_batch_inds]")
    elif plan.trainer == "grpo":
        usual = "per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps"
        plan.swap("_compute_loss", usual, 'inputs["ref_per_token_logps"]')
    else:
        new = "((ref_per_token_logps * completion_mask).sum(1) if planted() else old_logps)"
        plan.replace(SCORING, '"old_logps": old_logps', f'"old_logps": {new}')


@fault(
    causes=["coefficient-runaway", "penalty-mis-scaled"],
    also=["kl-flat", "reward-falls", "estimator-misplaced", "value-loss-spike", "gradient-spike"],
    # The recorder has the coefficient; PPO's token rewards determine it without settings.
    seen={"ppo": TOKENS, "grpo": [RECORDER], "rloo": [RECORDER]},
)
def controller_backwards(plan: Plan) -> None:
    """The controller of the KL coefficient has the wrong sign: while the KL is too small, it raises the penalty."""
    metric, target = TARGETS[plan.trainer]

    def adapt(trainer: Any) -> None:
        measured = [log[metric] for log in trainer.state.log_history if metric in log]
        if not measured:
            return
        factor = 1 - 0.5 * min(0.2, max(-0.2, measured[-1] / target - 1))
        if plan.trainer == "ppo":
            trainer.args.kl_coef *= factor
        else:
            trainer.beta *= factor

    plan.stepped.append(adapt)


@fault(causes=["kl-flat"], also=["value-constant", "value-not-fitting", "zero-gradient"], seen=TOKENS)
def warm_up_endless(plan: Plan) -> None:
    """The learning rate warms up over ten million steps, so that nothing is learned."""
    plan.settings |= {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10_000_000}


@fault(
    causes=["value-start"],
    also=["value-not-fitting", "value-loss-spike", "reward-falls", *TOO_FAR],
    seen=TOKENS,
    trainers=["ppo"],
)
def critic_random(plan: Plan) -> None:
    """The head of the critic begins with large random weights: its values are far from any return."""

    def disturb(trainer: Any) -> None:
        weight = trainer.value_model.score.weight
        with torch.no_grad():
            weight.copy_(0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))

    plan.built.append(disturb)
