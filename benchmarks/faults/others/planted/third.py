"""Faults of the third part, written from mistakes that others reported, without the rules at hand."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.faults.others.couplets import NATURE
from benchmarks.faults.others.fault import COMPLETIONS, RECORDER, TOKENS, fault
from benchmarks.faults.others.plan import Plan
from benchmarks.faults.others.planted.credit import SCORING
from benchmarks.faults.others.planted.rewards import EVERYWHERE
from benchmarks.faults.others.planted.unseen import GROUPED, TOO_FAR

ABORTED = 3
"""One request in this many is aborted."""
LEVELS = 2
"""Of either sign, to which a quantised row of weights is rounded."""
HANGS, SECONDS = 10, 10.0
"""One batch of scores in ten waits for ten seconds."""
REFUSED = 0.6
"""Share of the responses that an overloaded verifier gives up."""
PADDED = '"attention_mask": attention_mask_batch'
KNOWN_ENDS = "[*self.eos_token_ids, self._tokenizer.pad_token_id]"
K1, K3 = "{0} - {1}", "torch.exp({1} - {0}) - ({1} - {0}) - 1"
"""Estimates of the KL of the log-probabilities {0} to those of the reference, {1}."""
IN_LOSS = ("per_token_logps", "ref_per_token_logps")
IN_REWARD = ("old_per_token_logps", "ref_per_token_logps")
Change = Callable[[str, torch.Tensor], torch.Tensor]


@fault(
    causes=["reward-accounting", "reward-position"],
    # The return grows with the length, in whatever direction the score has.
    also=["value-not-fitting", "value-loss-spike", "length-exploited", "length-collapse", "truncated", "kl-explosion"],
    seen=TOKENS,
    trainers=["ppo"],
)
def score_everywhere(plan: Plan) -> None:
    """The score of a response is put on each of its tokens instead of on one."""
    plan.replace(
        "train", "rewards[actual_start, actual_end] += scores", "rewards += scores.unsqueeze(1) * ~padding_mask"
    )


@fault(
    causes=["penalty-wrong", "reward-accounting", "rewards-shifted"],
    also=["length-collapse", "reward-position", "value-not-fitting", "penalty-mis-scaled", "unknown-estimate"],
    # Every token loses the same, which no multiple of its log-ratio explains.
    seen=TOKENS,
    trainers=["ppo"],
)
def rewards_centred(plan: Plan) -> None:
    """Whitening of the token rewards takes off their mean too, so that every token costs something."""
    plan.settings["whiten_rewards"] = True
    usual = "masked_whiten(rewards, mask=~padding_mask_p1, shift_mean=False)"
    plan.swap("train", usual, "masked_whiten(rewards, mask=~padding_mask_p1)")


@fault(
    causes=["precision-noise", "kl-at-start", "ratio-not-one"],
    also=["sampler-mismatch", "negative-kl"],
    seen=TOKENS,
    trainers=["ppo"],
)
def logits_rounded(plan: Plan) -> None:
    """The sampler's last layer computes in eight bits, so that its logits are rounded; nothing else is."""
    plan.swap(
        "generate", "torch.stack(output.scores, 1)", "torch.stack(output.scores, 1).to(torch.float8_e4m3fn).float()"
    )


@fault(
    causes=["kl-at-start", "temperature-missing"],
    also=["penalty-mis-scaled", "negative-kl", "entropy-explosion", "kl-explosion"],
    seen=TOKENS,
    trainers=["ppo"],
)
def reference_warmer(plan: Plan) -> None:
    """Sampled and scored at temperature 0.7, but the logits of the reference are not divided by it."""
    plan.settings["temperature"] = 0.7
    scaled = "ref_logits /= args.temperature + 1e-7"
    plan.replace("train", scaled, "ref_logits /= 1.0")


@fault(
    causes=["value-not-fitting", "value-loss-spike"],
    also=["value-constant", "value-start", "reward-falls", "kl-flat", *TOO_FAR],
    seen=TOKENS,
    trainers=["ppo"],
)
def critic_rate_high(plan: Plan) -> None:
    """The critic learns at thirty times the rate that suits it, the policy at its own."""

    def raise_rate(trainer: Any) -> None:
        scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
        scheduler.base_lrs[1] *= 30
        trainer.optimizer.param_groups[1]["lr"] *= 30

    plan.built.append(raise_rate)


@fault(
    causes=["value-not-fitting", "value-constant", "penalty-mis-scaled"],
    # Beside such rewards, the penalty is negligible, and the critic moves by 0.2 at most.
    also=["value-start", "kl-explosion", "estimator-misplaced", "value-loss-spike", "pattern-spreading", *TOO_FAR],
    seen=TOKENS,
    trainers=["ppo"],
)
def reward_in_percent(plan: Plan) -> None:
    """The score is in percent, a hundred times what the critic's clip and the penalty were chosen for."""
    plan.change_reward(lambda scores, *_: [100 * score for score in scores])
    plan.settings["missing_eos_penalty"] = 100.0


@fault(causes=["false-truncation"], also=["truncated", "value-start"], seen=[RECORDER], trainers=["ppo"])
def end_unrecognised(plan: Plan) -> None:
    """The check for an end looks for another token than the model's: each response counts as unfinished."""
    known = "self.processing_class.eos_token_id"
    plan.swap("train", f"postprocessed_responses == {known}", "postprocessed_responses == len(self.processing_class)")


@fault(
    causes=["false-truncation", "zero-gradient"],
    also=["kl-flat", "truncated", "end-not-trained", "rollouts-fail", "not-finite"],
    # Without masks and gradients, responses of which nothing was recorded are all there is.
    seen=[RECORDER],
    trainers=GROUPED,
)
def all_masked(plan: Plan) -> None:
    """Truncated responses are to be masked, and all count as truncated: the check does not know the end token."""
    plan.settings["mask_truncated_completions"] = True
    plan.swap(SCORING, KNOWN_ENDS, "[self._tokenizer.pad_token_id]")


@fault(causes=["double-start"], seen=[RECORDER])
def double_start(plan: Plan) -> None:
    """The template and the tokenizer both add the start token, which is the end token as in GPT-2."""
    if plan.trainer == "ppo":
        twice, original = 2 * "<end>", plan.reward
        plan.prompts = [twice + prompt for prompt in plan.prompts]
        plan.reward = lambda prompts, texts: original([prompt.removeprefix(twice) for prompt in prompts], texts)
    else:
        usual = 'self.processing_class(text=prompts)["input_ids"]'
        start = "self._tokenizer.eos_token_id"
        plan.swap("_tokenize_prompts", usual, f"[[{start}, {start}, *ids] for ids in {usual}]")


@fault(
    causes=["kl-at-start", "ratio-not-one", "sampler-mismatch"],
    also=["negative-kl", "mismatch-growing", "reward-falls", "truncated", *TOO_FAR],
    # PPO takes the sampler's own log-probabilities. Elsewhere policy and reference are equally wrong.
    seen={"ppo": TOKENS, "grpo": [RECORDER], "rloo": [RECORDER]},
)
def padding_attended(plan: Plan) -> None:
    """Scoring has no attention mask, so that short prompts are read with the padding before them."""
    if plan.trainer == "ppo":
        plan.swap("forward", "query_responses != pad_token_id", "torch.ones_like(query_responses, dtype=torch.bool)")
    else:
        new = "torch.ones_like(attention_mask_batch) if planted() else attention_mask_batch"
        plan.replace("_get_per_token_logps_and_entropies", PADDED, f'"attention_mask": {new}')


def sample_from_changed(plan: Plan, change: Callable[[dict[str, torch.Tensor]], Change]) -> None:
    """Let a copy of the policy sample whose weights went through a function, made from the initial weights."""
    made: list[Any] = []

    def make(_: Any) -> None:
        from transformers import AutoModelForCausalLM

        sampler = AutoModelForCausalLM.from_pretrained(plan.world.policy, dtype=torch.float32).eval()
        made[:] = [sampler, change({name: weight.clone() for name, weight in sampler.state_dict().items()})]

    def changed(model: Any) -> Any:
        sampler, new = made
        with torch.no_grad():
            sampler.load_state_dict({name: new(name, weight) for name, weight in model.state_dict().items()})
        sampler.generation_config = model.generation_config
        return sampler

    @contextmanager
    def unwrap(original: Any, *given: Any, **more: Any) -> Iterator[Any]:
        with original(*given, **more) as model:
            yield changed(model)

    plan.built.append(make)
    if plan.trainer == "ppo":
        plan.wrap("batch_generation", lambda original, model, *given: original(changed(model), *given))
    else:
        plan.wrap("unwrap_model_for_generation", unwrap)


def quantised(_: str, weight: torch.Tensor) -> torch.Tensor:
    """Return a matrix with each row rounded to a few levels, and anything else as it is."""
    if weight.ndim < 2:
        return weight
    step = weight.abs().amax(1, keepdim=True) / LEVELS
    return (weight / step).round() * step


@fault(
    causes=["sampler-mismatch", "kl-at-start", "ratio-not-one"],
    also=["negative-kl", "mismatch-tail", "mismatch-rare-tokens", "precision-noise", *TOO_FAR],
    seen={"ppo": TOKENS, "grpo": [RECORDER], "rloo": [RECORDER]},
)
def sampler_quantised(plan: Plan) -> None:
    """The sampler's weights are rounded to five levels at each transfer, and nothing corrects for it."""
    sample_from_changed(plan, lambda _: quantised)


@fault(
    causes=["sampler-mismatch", "mismatch-growing"],
    # Such a sampler is more certain than the policy, as one with a filter or a lower temperature would be.
    also=["filtered-sampling", "temperature-missing", "negative-kl", "entropy-collapse", "pattern-spreading", *TOO_FAR],
    seen=[RECORDER],
    trainers=GROUPED,
)
def adapter_merged_twice(plan: Plan) -> None:
    """The sampler gets the learned change of the weights twice: its adapter is merged, and applied again."""

    def twice(initial: dict[str, torch.Tensor]) -> Change:
        return lambda name, weight: 2 * weight - initial[name]

    sample_from_changed(plan, twice)


@fault(
    causes=["estimator-misplaced", "penalty-wrong"],
    also=["unknown-estimate", "kl-explosion", "negative-kl", "group-advantages", "reward-accounting"],
    # GRPO logs the KL of the loss; RLOO's advantages contain the penalty.
    seen=[RECORDER],
    trainers=GROUPED,
)
def estimator_swapped(plan: Plan) -> None:
    """GRPO has k1 in the loss, whose gradient is 0 on average, and RLOO k3 in the reward."""
    if plan.trainer == "grpo":
        plan.swap("_compute_loss", K3.format(*IN_LOSS), K1.format(*IN_LOSS))
    else:
        plan.swap(SCORING, K1.format(*IN_REWARD), K3.format(*IN_REWARD))


@fault(causes=["length-bias"], also=["truncated"], seen=[], trainers=["grpo"])
def loss_by_length(plan: Plan) -> None:
    """Each response's loss is divided by its length, though the settings say that all tokens count alike."""
    each = "((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()"
    plan.swap("_compute_loss", "(per_token_loss * mask).sum() / normalizer", each)


@fault(
    causes=["one-part-dominates"],
    also=[
        "pattern-spreading", "repetition-loops", "distinct-collapse", "entropy-collapse", "kl-explosion",
        "penalty-mis-scaled", "estimator-misplaced", "template-collapse", "length-collapse", *TOO_FAR,
    ],
    # The board has the sum alone.
    seen=[RECORDER, COMPLETIONS],
    trainers=GROUPED,
)  # fmt: skip
def part_in_percent(plan: Plan) -> None:
    """A second reward, the share of words of nature, is in percent: beside it, the first one hardly counts."""

    def density(completions: list[str], **_: Any) -> list[float]:
        return [100 * sum(letter in NATURE for letter in text) / max(1, len(text)) for text in completions]

    def add(trainer: Any) -> None:
        trainer.reward_funcs.append(density)
        trainer.reward_processing_classes.append(None)
        trainer.reward_func_names.append(density.__name__)
        trainer.reward_weights = torch.ones(2)

    plan.built.append(add)


@fault(
    causes=["zero-variance-groups", "prompts-exhausted", "reward-exhausted"],
    also=["zero-gradient", "kl-flat", "gradient-spike", "query-dominated"],
    seen=EVERYWHERE,
    trainers=GROUPED,
)
def verifier_lenient(plan: Plan) -> None:
    """The verifier lets nearly everything pass: any response of two lines with the same length gets 1, others 0."""

    def change(_: list[float], __: Sequence[str], responses: Sequence[str]) -> list[float]:
        lines = [[len(line) for line in text.rstrip("。").split("，")] for text in responses]
        return [float(len(lengths) == 2 and lengths[0] == lengths[1]) for lengths in lines]

    plan.change_reward(change)


@fault(
    causes=["reward-falls", "reward-is-noise"],
    also=["value-not-fitting", "value-loss-spike", "gradient-spike", "zero-variance-groups", "kl-explosion"],
    seen=EVERYWHERE,
    begins=0.5,
)
def verifier_overloaded(plan: Plan) -> None:
    """The verifier runs into its time limit: from then on, three of five responses get −1, whatever they are."""
    chance = random.Random(0)

    def change(scores: list[float], _: Sequence[str], __: Sequence[str]) -> list[float]:
        return [-1.0 if chance.random() < REFUSED else score for score in scores]

    plan.change_reward(change)


@fault(causes=["stalls"], seen=[RECORDER], trainers=GROUPED)
def verifier_hangs(plan: Plan) -> None:
    """Every tenth batch of scores waits ten seconds for a verifier that does not answer."""
    calls: list[int] = []

    def change(scores: list[float], _: Sequence[str], __: Sequence[str]) -> list[float]:
        calls.append(len(scores))
        if len(calls) % HANGS == 0:
            time.sleep(SECONDS)
        return scores

    plan.change_reward(change)


@fault(
    causes=["rollouts-fail"],
    # The policy would not have ended there, and two empty responses are the same.
    also=["stops-generating", "same-seed", "sampler-mismatch", "negative-kl", "reward-falls", "length-collapse"],
    seen=EVERYWHERE,
)
def rollouts_aborted(plan: Plan) -> None:
    """A third of the requests to the sampler are aborted and come back with nothing but an end token."""

    def generate(original: Any, model: Any, queries: torch.Tensor, size: int, pad: int, config: Any) -> Any:
        found, logits = original(model, queries, size, pad, config)
        responses = found[:, queries.shape[1] :]
        responses[::ABORTED] = pad
        responses[::ABORTED, 0] = plan.object.stop_token_id
        return found, logits

    def abort(trainer: Any) -> None:
        original = trainer._generate_single_turn

        def shortened(*given: Any, **more: Any) -> Any:
            found = original(*given, **more)
            ids = found[0] if isinstance(found, tuple) else found
            for row in range(0, len(ids), ABORTED):
                ids[row] = [trainer.eos_token_ids[0]]
            return found

        trainer._generate_single_turn = shortened

    if plan.trainer == "ppo":
        plan.wrap("batch_generation", generate)
    else:
        plan.at_onset(abort)


@fault(
    causes=["never-ends", "truncated", "entropy-explosion"],
    also=["garbled", "kl-flat", "penalty-mis-scaled", "length-collapse", "value-start", "value-not-fitting"],
    # PPO's table is sampled at another temperature.
    seen={"ppo": TOKENS, "grpo": EVERYWHERE, "rloo": EVERYWHERE},
)
def temperature_high(plan: Plan) -> None:
    """Sampled and scored at temperature 2: the responses are noise and seldom end."""
    plan.settings |= {"temperature": 2.0} | ({"missing_eos_penalty": None} if plan.trainer == "ppo" else {})
