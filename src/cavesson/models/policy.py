"""The models of a run by role: policy, critic and reference, sharing weights where possible."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import one_hot, pad
from transformers import Cache, PreTrainedModel

from cavesson.errors import UserError, first_line
from cavesson.models.classifier import is_classifier, load_scalar_classifier
from cavesson.models.layers import as_in_run, recompute_layers
from cavesson.models.load import HEADS
from cavesson.models.mapped import aliased, forward_dtype, hidden, is_mapped
from cavesson.models.packed import pack_rows, packed_states
from cavesson.models.parts import adapts_shared, causal, check_head, outdated_names, output_head, trunk
from cavesson.models.quantized import check_trainable, is_quantized
from cavesson.models.settings import (
    ModelSettings,
    OtherModelSettings,
    ReferenceSettings,
    TeacherSettings,
    ValueSettings,
)
from cavesson.models.sharding import device_of
from cavesson.models.shared_prompts import distinct, growing_cache
from cavesson.models.tiny import cast_weights
from cavesson.models.trained import load_start
from cavesson.models.vocabulary import check_vocabulary
from cavesson.ops.divergence import generalised_jsd
from cavesson.ops.head import Head
from cavesson.ops.logprobs import LogProbs, token_logprobs
from cavesson.ops.masked import spread
from cavesson.types import Batch, Scores, places_of

T = TypeVar("T")


class ValueHead(nn.Linear):
    """Linear map from hidden states to values. It starts at zero, so that an untrained critic predicts 0, not noise."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    @torch.no_grad()
    def start_from(self, head: nn.Linear) -> None:
        """Copy the weights of a reward model's head, so that initial values are its rewards of the text so far."""
        self.weight.copy_(head.weight)
        if head.bias is not None:
            self.bias.copy_(head.bias)


class Policy(nn.Module):
    """The trained model, wrapped by PEFT if it has adapters, its critic, and the models that it is compared with.

    The `temperature` divides the logits of all of them, as in sampling. `value` is "trunk", a separate trunk, or None
    for algorithms without a critic; `reference`, to which the KL is measured, is "adapters-off", a frozen model, or
    None; `teacher` is a frozen model or None. With a `divergence`, the β of `generalised_jsd`, `forward` also computes
    that from the teacher. With `shares_prompts`, a prompt is read once for all its responses in a batch. The two ways
    round differently, so all scores use the same way: of all models, with gradients and without.
    """

    passes: ClassVar[tuple[str, ...]] = (
        "reference_logprob", "reference_kl", "kl_from", "teacher_logprob", "teaching", "next_value", "check", "during"
    )  # fmt: skip
    """methods besides `forward` that use the weights and are called from outside"""

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        *,
        temperature: float = 1.0,
        value: nn.Module | str | None = None,
        reference: PreTrainedModel | str | None = None,
        teacher: PreTrainedModel | None = None,
        divergence: float | None = None,
        shares_prompts: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.dtype = forward_dtype(causal(model))
        self.temperature = temperature
        self.shares_prompts = shares_prompts
        self.packed = False
        """whether rows are read as packed sequences; then no prompts are shared"""
        self.logprobs: LogProbs = token_logprobs
        self.critic = value if isinstance(value, nn.Module) else None
        read: Any = causal(model) if self.critic is None else self.critic
        self.value_head = None if value is None else ValueHead(read.config.get_text_config().hidden_size)
        self.divergence = divergence

        def frozen(model: PreTrainedModel) -> Policy:
            return Policy(model, temperature=temperature, shares_prompts=shares_prompts)

        # In a tuple, a frozen model is not a submodule: its weights are not trained or saved with the policy's.
        self._reference = (frozen(reference) if isinstance(reference, PreTrainedModel) else reference,)
        self._teacher = (None if teacher is None else frozen(teacher),)
        # Evaluation mode disables all randomness: dropout and the noise of mixture-of-experts routers.
        self.eval()
        if not is_mapped(self):
            self.check()

    def check(self) -> None:
        """Raise a UserError unless the model is scored correctly."""
        check_head(self.model)

    def during(self, action: Callable[[], T]) -> T:
        """Return what an action returns that makes passes through the model by itself, with all processes alike."""
        return action()

    @property
    def device(self) -> torch.device:
        return device_of(self)

    @property
    def pads(self) -> bool:
        """Whether rows are padded to the longest of a batch."""
        return not self.packed

    @property
    def has_reference(self) -> bool:
        return self._reference != (None,)

    @property
    def frozen_reference(self) -> "Policy | None":
        """The reference, if it is a separate model."""
        (reference,) = self._reference
        return reference if isinstance(reference, Policy) else None

    @property
    def teacher(self) -> "Policy | None":
        """The teacher, if it is a model here."""
        return self._teacher[0]

    @property
    def frozen(self) -> "dict[str, Policy]":
        """The models beside the trained one that are not trained, by their roles."""
        found = {"reference": self.frozen_reference, "teacher": self.teacher}
        return {name: one for name, one in found.items() if one is not None}

    def forward(self, batch: Batch) -> Scores:
        """Compute log-probability, entropy and value of every learned token, differentiable if gradients are on."""
        hidden = self.hidden(self.model, batch)
        value = None
        if self.value_head is not None:
            seen = hidden if self.critic is None else self.hidden(self.critic, batch)
            value = _at_learned(self.value_head(seen.float()).squeeze(-1), batch)
        taught = () if self.divergence is None else self._taught(hidden, batch, self.divergence)
        return Scores(*self._logprobs(self.model, hidden, batch), value, *taught)

    def _taught(self, hidden: Tensor, batch: Batch, beta: float) -> tuple[Tensor, Tensor]:
        """Compute the divergence from the teacher, given the policy's states, and the teacher's log-probabilities."""
        assert self.teacher is not None, "a divergence needs a teacher"
        states, head, logprob = self.teacher.teaching(batch)
        found = generalised_jsd(hidden, output_head(self.model), states, head, beta, self.temperature)
        return _at_learned(found, batch), logprob

    @torch.no_grad()
    def teaching(self, batch: Batch) -> tuple[Tensor, Head, Tensor]:
        """Compute what another model learns from this one: states `[N, H]`, their head, and log-probabilities `[B, T]`.

        Sharded weights are freed after this pass, so their head is a copy.
        """
        states, head = self.hidden(self.model, batch), output_head(self.model)
        if isinstance(self, FSDPModule):
            head = head._replace(weight=head.weight.clone(), bias=None if head.bias is None else head.bias.clone())
        return states, head, self._logprobs(self.model, states, batch)[0]

    @torch.no_grad()
    def teacher_logprob(self, batch: Batch) -> Tensor:
        """Compute the log-probability `[B, T]` of every learned token under the teacher."""
        assert self.teacher is not None, "no teacher is a model here"
        return self.teacher(batch).logprob  # type: ignore[no-any-return]

    @torch.no_grad()
    def reference_logprob(self, batch: Batch) -> Tensor:
        """Compute the log-probability `[B, T]` of every learned token under the reference."""
        frozen = self.frozen_reference
        if frozen is not None:
            return frozen(batch).logprob  # type: ignore[no-any-return]
        with self._adapters_off():
            return self._logprobs(self.model, self.hidden(self.model, batch), batch)[0]

    @torch.no_grad()
    def reference_kl(self, batch: Batch) -> Tensor:
        """Compute the exact KL(policy ‖ reference) over the vocabulary at every learned token, `[B, T]`."""
        hidden, head, frozen = self.hidden(self.model, batch), output_head(self.model), self.frozen_reference
        if frozen is not None:
            kl = frozen.kl_from(hidden, head, batch)
        else:
            with self._adapters_off():
                kl = Policy.kl_from(self, hidden, head, batch)
        return _at_learned(kl, batch)

    @torch.no_grad()
    def kl_from(self, hidden: Tensor, head: Head, batch: Batch) -> Tensor:
        """Compute the exact KL(p ‖ self) `[N]` at the N learned tokens, p being a head on hidden states `[N, H]`."""
        mine = self.hidden(self.model, batch)
        return generalised_jsd(hidden, head, mine, output_head(self.model), 1.0, self.temperature)

    @torch.no_grad()
    def next_value(self, batch: Batch) -> Tensor:
        """Compute the critic's value `[B]` of the state after each response, for a batch of `after_responses`."""
        assert self.value_head is not None
        states = self.hidden(self.model if self.critic is None else self.critic, batch)
        return self.value_head(states.float()).squeeze(-1)  # type: ignore[no-any-return]

    def hidden(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the trunk's last hidden states from which the N learned tokens are predicted, `[N, H]`."""
        with as_in_run():
            if self.packed:
                return self._packed(model, batch)
            states = self._padded(model, batch).flatten(0, 1)
        return states[places_of(batch.on_host["learned"] > 0, states.device)]

    def _packed(self, model: nn.Module, batch: Batch) -> Tensor:
        tokens, mask = _rows(batch.on_host)
        predicts = pad(batch.on_host["learned"] > 0, (tokens.shape[1] - batch["learned"].shape[1], 0))
        states = packed_states(model, pack_rows(tokens, mask).to(batch["learned"].device)).squeeze(0)
        return states[places_of(predicts[mask > 0], states.device)]

    def _padded(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the states from which each response token is predicted, `[B, T, H]`."""
        prompt, response = batch["prompt_ids"], batch["response_ids"]
        tokens, mask = _rows(batch)
        cache = growing_cache(causal(model).config) if self.shares_prompts else None
        if cache is None:
            return last_states(model, tokens, mask)[:, prompt.shape[1] - 1 :]
        among = distinct(prompt, batch["prompt_mask"])
        prompt_mask = batch["prompt_mask"][among.first]
        before = last_states(model, prompt[among.first], prompt_mask, cache)[among.prompt, -1:]
        if response.shape[1] == 1:
            return before
        among.spread(cache)
        after = last_states(model, response[:, :-1], mask, cache)
        return torch.cat([before, after], dim=1)

    def _logprobs(self, model: nn.Module, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        places = places_of(batch.on_host["learned"] > 0, hidden.device)
        targets = batch["response_ids"].flatten()[places]
        logprob, entropy = self.logprobs(hidden, output_head(model), targets, self.temperature)
        return _at_learned(logprob, batch), _at_learned(entropy, batch)

    def _adapters_off(self) -> AbstractContextManager[None]:
        if self._reference == ("adapters-off",) and isinstance(self.model, PeftModel):
            return self.model.disable_adapter()
        raise ValueError("this policy has no reference")


def _rows(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return prompts and responses without their last tokens, and the mask of the tokens that exist, `[B, S + T − 1]`.

    Nothing is predicted from a last token.
    """
    mask = torch.cat([batch["prompt_mask"], batch["attended"].to(batch["prompt_mask"].dtype)], dim=1)
    return torch.cat([batch["prompt_ids"], batch["response_ids"]], dim=1)[:, :-1], mask[:, :-1]


def after_responses(batch: Batch) -> Batch:
    """Return prompts and responses with another token, the only learned one: its state is that after the response.

    Which token it is does not matter, since it is not read.
    """
    after = one_hot(batch["attended"].sum(1).long(), batch["attended"].shape[1] + 1).to(batch["attended"].dtype)
    return Batch(
        {
            **{name: batch[name] for name in ("prompt_ids", "prompt_mask")},
            "response_ids": pad(batch["response_ids"], (0, 1)),
            "attended": pad(batch["attended"], (0, 1)) + after,
            "learned": after,
        }
    )


def _at_learned(x: Tensor, batch: Batch) -> Tensor:
    """Return numbers `[N]` of the learned tokens at their places `[B, T]`."""
    return spread(x, places_of(batch.on_host["learned"] > 0, x.device), batch["learned"])


def build_policy(
    model: PreTrainedModel,
    settings: ModelSettings,
    value: ValueSettings | None,
    reference: ReferenceSettings | None,
    temperature: float,
    shares_prompts: bool = False,
    mapped: bool = False,
    teacher: TeacherSettings | None = None,
    divergence: float | None = None,
) -> Policy:
    """Build a policy with its critic, reference and teacher, if there are settings of them, from a loaded model.

    `mapped` says whether all of it will be sharded, so that other models may stay in their files, see `mapped`, and
    copies of the model need no memory. The other arguments are as for `Policy`.

    Raises:
        UserError: the settings contradict each other.
    """
    role = _reference(model, settings, reference, mapped) if reference else None
    critic, head = _critic(model, settings, value, mapped) if value else (None, None)
    for learner in (model, critic):
        if isinstance(learner, nn.Module):
            recompute_layers(learner, settings.recomputed)
    dtype = forward_dtype(model)
    policy = Policy(
        with_adapters(model, settings),
        temperature=temperature,
        value=critic,
        reference=role,
        teacher=None if teacher is None else _other(model, settings, teacher, "teacher", mapped),
        divergence=divergence,
        shares_prompts=shares_prompts,
    )
    if policy.critic is not None:
        cast_weights(policy.critic, dtype)
    if head is not None:
        assert policy.value_head is not None
        policy.value_head.start_from(head)
    return policy


def build_learner(model: PreTrainedModel, settings: ModelSettings) -> PreTrainedModel | PeftModel:
    """Prepare a loaded model for training: all of it, or only adapters."""
    recompute_layers(model, settings.recomputed)
    return with_adapters(model, settings)


def positions(mask: Tensor) -> Tensor:
    """Return the position of every token, counted from the first that is not padding: `[B, L]`."""
    return (mask.cumsum(1) - 1).clamp_min(0)


def last_states(model: nn.Module, ids: Tensor, mask: Tensor, cache: Cache | None = None) -> Tensor:
    """Compute the trunk's last hidden states of tokens `[B, L]`; `mask` also covers those in the cache before them."""
    position = positions(mask)[:, -ids.shape[1] :]
    output = trunk(model)(
        input_ids=ids, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=cache is not None
    )
    return output.last_hidden_state  # type: ignore[no-any-return]


def _reference(
    model: PreTrainedModel, settings: ModelSettings, reference: ReferenceSettings, mapped: bool
) -> PreTrainedModel | str | None:
    kind = reference.resolved(settings.lora is not None)
    if kind == "none":
        return None
    if kind == "adapters-off":
        if settings.lora is None:
            raise UserError('reference.kind "adapters-off" needs model.lora; without adapters use "copy"')
        return kind
    if kind == "copy":
        return (aliased(model) if mapped else copy.deepcopy(model)).requires_grad_(False)
    return _other(model, settings, reference, "reference", mapped)


def _other(
    model: PreTrainedModel, settings: ModelSettings, other: OtherModelSettings, name: str, mapped: bool
) -> PreTrainedModel:
    """Return a frozen model beside the policy's, of the same vocabulary."""
    start = other.start(settings.dtype)
    assert start is not None, "settings refuse a model without a path"
    loaded = load_start(start, mapped=mapped).requires_grad_(False)
    check_vocabulary(loaded, name, start, model, settings)
    return loaded


def _critic(
    model: PreTrainedModel, settings: ModelSettings, value: ValueSettings, mapped: bool
) -> tuple[nn.Module | str, nn.Linear | None]:
    """Return the critic's trunk, or "trunk", and the head of the reward model that the critic starts from, if any."""
    if not value.is_separate:
        return "trunk", None
    start = value.start(settings.dtype)
    if start is None:
        check_trainable(model, f"the critic's start {settings.path}")
        own = trunk(model)
        return (aliased(own) if mapped else copy.deepcopy(own)).requires_grad_(True), None
    is_reward_model = is_classifier(start.path)
    load = load_scalar_classifier if is_reward_model else load_start
    other: PreTrainedModel = load(start, mapped=mapped)
    check_trainable(other, f"the critic {start.path}")
    check_vocabulary(other, "critic", start, model, settings)
    head = getattr(other, "score", None) if is_reward_model else None
    if is_reward_model and not isinstance(head, nn.Linear):
        raise UserError(f"the critic {start.path} is a {other.config.model_type}, which does not score every token")
    return trunk(other).requires_grad_(True), head


def with_adapters(model: PreTrainedModel, settings: ModelSettings) -> PreTrainedModel | PeftModel:
    """Add adapters to a model if its settings ask for them; a classifier's head is trained as well.

    Raises:
        UserError: `model.lora.targets` does not fit the model, or includes its head or what is the same tensor,
            or the weights are quantized and there would be no adapters.
    """
    lora = settings.lora
    if lora is None:
        check_trainable(model, settings.path)
        return model
    if is_quantized(model):
        # PEFT's gradient checkpointing needs training mode; `recompute_layers` does not.
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    head = [name for name in HEADS if isinstance(getattr(model, name, None), nn.Module)]
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        use_dora=lora.dora,
        task_type="SEQ_CLS" if head else None,
        modules_to_save=head or None,
    )
    try:
        # Adapters get the dtype of the forward pass, whatever is in the files: in float32, PEFT's default, each would
        # convert its input and output, and a GPU would multiply without its matrix units. DoRA stays in float32: it
        # divides by norms of whole weights, which bfloat16 would round by more than training changes them.
        with outdated_names(), hidden(model):
            wrapped: PeftModel = get_peft_model(model, config, autocast_adapter_dtype=lora.dora)
    except ValueError as error:
        raise UserError(f"model.lora.targets {targets}: {first_line(error)}") from error
    if isinstance(model.get_output_embeddings(), BaseTunerLayer):
        raise UserError(f"model.lora.targets {targets} include the output head, which is scored without adapters")
    if adapts_shared(wrapped):
        raise UserError(
            f"model.lora.targets {targets} include the input embedding, which is the output head of this model too: "
            "merged, the adapter would change both; remove it"
        )
    return wrapped
