"""The models of a run by role on fake tensors, built from configs alone."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedTokenizerBase

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.models.compiled import compile_layers
from cavesson.models.mapped import forward_dtype, mark
from cavesson.models.parts import causal, trunk
from cavesson.models.passes import Role, Ways, exact_ways, models_of, roles_of, take
from cavesson.models.policy import Policy
from cavesson.models.sequences import RewardModel
from cavesson.models.settings import ModelSettings, ReferenceSettings
from cavesson.ops.piece_logprobs import PLAIN, piece_logprobs
from cavesson.plan.compiled import fused
from cavesson.plan.fakes import fake
from cavesson.plan.largest import LargestRollouts
from cavesson.plan.skeleton import skeleton
from cavesson.processes import Processes
from cavesson.train.ways import compiles, packs
from cavesson.types import Batch

_TOKEN_COLUMNS = ("logprob", "ref_logprob", "teacher_logprob", "sampler_logprob", "kl_penalty", "entropy", "value")


def fake_policy(settings: RolloutRun, tokenizer: PreTrainedTokenizerBase, layers: int | None) -> Policy:
    """Build the policy of a run, with its critic, reference and teacher, as `build_policy` does from loaded models."""
    kind = settings.reference.resolved(settings.model.lora is not None)
    frozen = _reference_model(settings.model, settings.reference)
    reference: Any = "adapters-off" if kind == "adapters-off" else None
    if frozen is not None:
        reference = _unread(frozen, tokenizer, layers, adapters=False).requires_grad_(False)
    critic: Any = None if settings.critic is None else "trunk"
    start = _critic_model(settings)
    if start is not None:
        critic = trunk(_unread(start, tokenizer, layers, adapters=False)).requires_grad_(True)
    teacher: Any = settings.local_teacher and settings.local_teacher.start(settings.model.dtype)
    if teacher is not None:
        teacher = _unread(ModelSettings(**dict(teacher)), tokenizer, layers, adapters=False).requires_grad_(False)
    policy = Policy(
        _unread(settings.model, tokenizer, layers),
        temperature=settings.scoring_temperature,
        value=critic,
        reference=reference,
        teacher=teacher,
        divergence=settings.divergence,
        shares_prompts=settings.shares_prompts,
    )
    fixed: Any
    for fixed in policy.frozen.values():
        fake(fixed)
        fixed.to = partial(_stay, fixed)  # it is there already, and fake parameters cannot be moved
    return fake(policy)


def _stay(role: Policy, _device: torch.device) -> Policy:
    """Return a role that is there already."""
    return role


def sequence_role(
    settings: ExampleRun, tokenizer: PreTrainedTokenizerBase, classifier: bool, layers: int | None
) -> Any:
    """Build the role of a run; `classifier` means that it is a reward model."""
    role: Any = settings.role(_unread(settings.model, tokenizer, layers, classifier=classifier))
    trunk(role.model).register_forward_pre_hook(_number, with_kwargs=True)
    return fake(role)


_exact: dict[str, tuple[Ways, list[str]]] = {}
"""The ways that are exact and why others are not, by models: simulations of a run have the same models many times."""


def as_on_gpu(role: Role, settings: ModelSettings) -> list[str]:
    """Let a role compute as it does on a GPU; return why it does not in the fastest ways.

    What a run tries when it starts is tried here, too, but for the numbers, which fake tensors do not have.
    """
    wanted, models = Ways(packs(settings), fused if compiles(settings) else None), models_of(role)
    key = repr((type(role), wanted, *((type(model), _without_depth(model)) for model in models)))
    if key not in _exact:
        _exact[key] = exact_ways(role, wanted)
    elif _exact[key][0].compile is not None:
        for model in models:
            compile_layers(model, fused)
    used, reasons = _exact[key]
    take(role, used)
    for one in roles_of(role):
        if not isinstance(one, RewardModel):
            one.logprobs = partial(piece_logprobs, kernels=PLAIN if used.compile is None else _FUSED)
    return reasons


def _without_depth(model: nn.Module) -> dict[str, Any]:
    """Return the config of a model without the number of its layers."""
    config = causal(model).config.get_text_config()
    kinds = sorted(set(getattr(config, "layer_types", None) or ()))
    return {**config.to_dict(), "num_hidden_layers": None, "layer_types": kinds}


def _scores(products: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Read the products twice, and write a few numbers per row."""
    return products.amax(-1), products.sum(-1), products.new_empty(len(products))


def _gradient(products: Tensor, *known: Any) -> Tensor:
    """Read the products, and write their gradient."""
    *_, dtype, _scale, _softcap, _temperature = known
    return products.to(dtype, copy=True)


_FUSED = PLAIN._replace(scores=_scores, gradient=_gradient)
"""What compiled kernels read, write and keep."""


def _number(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a model the positions that it would count itself: in fake ones it cannot see that nothing is packed."""
    ids = kwargs.get("input_ids")
    if ids is None or kwargs.get("position_ids") is not None:
        return args, kwargs
    with unset_fake_temporarily():
        return args, kwargs | {"position_ids": torch.arange(ids.shape[1])[None]}


def prompts_of(rows: int, prompts: int, tokens: int) -> Tensor:
    """Return the ids `[B, S]` of prompts of `tokens` tokens, with `prompts` different ones among the rows."""
    different = torch.arange(rows) * prompts // rows
    return (different[:, None] + 1).expand(rows, tokens).contiguous()


def rollouts_of(settings: RolloutRun, largest: LargestRollouts, rows: int) -> Batch:
    """Return so many rollouts of the largest size, credited by the algorithm."""
    tokens, numbers = torch.ones(rows, largest.response), torch.arange(rows, dtype=torch.float64)
    prompt = prompts_of(rows, min(rows, largest.prompts), largest.prompt)
    columns = {"prompt_ids": prompt, "prompt_mask": torch.ones_like(prompt)}
    if largest.response > 1:
        tokens[:1, -1] = 0.0  # responses differ in length, so attention needs a mask
    columns |= {
        "response_ids": tokens.long(),
        "attended": tokens,
        "learned": tokens,
        "ended": torch.ones(rows),
        "kl_coef": torch.ones(rows),
    }
    columns |= {name: torch.zeros_like(tokens) for name in _TOKEN_COLUMNS}
    groups = torch.arange(rows) // settings.samples_per_prompt
    columns["next_value"] = torch.zeros(rows)
    columns |= {"reward": numbers, "shaped_reward": numbers, "group_in_step": groups}
    columns |= {"chosen": torch.ones(rows, dtype=torch.bool), "discarded": torch.zeros(rows, dtype=torch.bool)}
    credited: Batch = settings.algorithm.credit(Batch(columns), settings.kl_coef or 0.0, Processes("cpu"))
    return credited


def _unread(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase, layers: int | None, **options: bool) -> Any:
    """Build a model whose weights have not been read, so that a role does not check how it scores: it needs numbers."""
    model = skeleton(settings, tokenizer, layers=layers, **options)
    mark(model, forward_dtype(model))
    return model


def _reference_model(model: ModelSettings, reference: ReferenceSettings) -> ModelSettings | None:
    """Return the settings of the frozen reference, or None if it is not a separate model."""
    start = reference.start(model.dtype)
    if start is not None:
        return ModelSettings(**dict(start))
    return model if reference.resolved(model.lora is not None) == "copy" else None


def _critic_model(settings: RolloutRun) -> ModelSettings | None:
    """Return the settings of the model that a separate critic starts from, or None without one."""
    if settings.critic is None or not settings.critic.is_separate:
        return None
    start = settings.critic.start(settings.model.dtype)
    if start is None:
        return settings.model
    return ModelSettings(**dict(start), gradient_checkpointing=settings.model.gradient_checkpointing)
