"""Building a trainer, ready for its first step, from settings."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cavesson.algorithms.judged import judged, turn_end
from cavesson.algorithms.runs import ExampleRun, RolloutRun, RunSettings
from cavesson.cluster.connection import is_on_ray
from cavesson.config_paths import full_path
from cavesson.data.chat import read_template
from cavesson.data.prompts import PromptSet
from cavesson.errors import UserError
from cavesson.findings.report import noted
from cavesson.integrations.trackers import require
from cavesson.models.compiled import Compile
from cavesson.models.fingerprint import fingerprint
from cavesson.models.load import prepare, with_pad_token
from cavesson.models.mapped import in_memory, is_mapped
from cavesson.models.parts import causal, output_head
from cavesson.models.policy import Policy, build_learner
from cavesson.models.settings import StartSettings
from cavesson.models.sharding import place, skeleton
from cavesson.models.trained import check_start, load_start
from cavesson.processes import Processes
from cavesson.randomness import Purpose, generator
from cavesson.rollout.conversation import Conversation
from cavesson.rollout.engines.building import EngineParts
from cavesson.rollout.engines.memory_check import check_embedded
from cavesson.rollout.engines.teacher import TeacherServers
from cavesson.rollout.engines.vllm_server import saved_model
from cavesson.rollout.engines.vllm_weights import NcclGroup
from cavesson.rollout.environments import Factory
from cavesson.rollout.loading import Given, fingerprints
from cavesson.rollout.rewards.base import RewardFunction
from cavesson.rollout.rewards.fingerprint import object_fingerprints, settings_fingerprints
from cavesson.rollout.rewards.shaping import Shaping
from cavesson.rollout.rewards.table import Reward, build_rewards, check_columns, rehearse
from cavesson.scratch import Scratch
from cavesson.text.counting import counted
from cavesson.train.batches import Batches, BatchesAhead, begin_thread
from cavesson.train.given import Mix
from cavesson.train.held_out import HeldOut
from cavesson.train.in_backward import optimizer_of
from cavesson.train.loop import Trainer
from cavesson.train.offline import ExampleTrainer
from cavesson.train.one_pass import OnePassTrainer
from cavesson.train.online import RolloutTrainer
from cavesson.train.prompts import conversation_of, dropped_prompts, is_rewarded, longest_read, prompts_of, tried
from cavesson.train.rollouts import Collector
from cavesson.train.update import Learner
from cavesson.train.ways import compiler_of, way_remarks


@dataclass(frozen=True)
class Inputs:
    """Objects that a Python caller can pass instead of naming them in the settings."""

    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    prompts: Sequence[str] | Mapping[str, Sequence[Any]] | None = None
    rewards: RewardFunction | Sequence[Reward | RewardFunction] | None = None
    environment: Factory | Mapping[str, Factory] | None = None
    tools: Sequence[Callable[..., Any]] | None = None

    @property
    def given(self) -> list[str]:
        return [name for name, value in vars(self).items() if value is not None]

    @property
    def named_rewards(self) -> tuple[Reward, ...]:
        """The rewards with their names."""
        given = [self.rewards] if callable(self.rewards) else self.rewards or ()
        return tuple(
            one if isinstance(one, Reward) else Reward(getattr(one, "__name__", "reward"), one) for one in given
        )

    def reward_fingerprints(self, settings: RunSettings) -> dict[str, str]:
        """Return the fingerprints of the rewards, environments and tools of a run, by their names."""
        if not isinstance(settings, RolloutRun):
            return {}
        given = self.rewards is not None
        rewards = object_fingerprints(self.named_rewards) if given else settings_fingerprints(settings.rewards)
        return rewards | fingerprints(settings.environment, self.played)

    @property
    def played(self) -> Given:
        """The environment and the tools."""
        return Given(self.environment, self.tools or ())


def build(settings: RolloutRun | ExampleRun, inputs: Inputs, processes: Processes) -> Trainer:
    """Read the data, load the models and build the trainer."""
    if inputs.model is not None and inputs.tokenizer is None:
        raise UserError("a model object comes without its tokenizer; pass tokenizer= as well")
    if settings.batch_size < processes.count:
        raise UserError(f"batch_size {settings.batch_size} is less than the {processes.count} processes")
    if settings.update.in_backward and processes.count > 1:
        raise UserError(
            'update.in_backward needs a single process; with several, parallel.shard = "full" splits the gradients'
        )
    require(settings.trackers)
    for name, start in settings.starts().items():
        if name != "model" or inputs.model is None:
            check_place(name, start)
    if isinstance(settings, RolloutRun):
        return build_rollout_trainer(settings, inputs, processes)
    return build_example_trainer(settings, inputs, processes)


def as_loaded(settings: RolloutRun | ExampleRun, model: PreTrainedModel) -> RolloutRun | ExampleRun:
    """Return the settings of a run with the dtype of its model object, which a reference or critic is loaded in too.

    Without a path in the settings, it is the name of the object, empty if that was not loaded from anywhere: adapters
    are saved with it.

    Raises:
        UserError: the object has adapters, or a setting of how the model is loaded has no effect, because the object is
            already loaded.
    """
    if isinstance(model, PeftModel):
        raise UserError(
            "model= has PEFT adapters; pass its base and set model.lora to train new ones, or merge them first: "
            "model.merge_and_unload()"
        )
    for name in ("gguf_file", "quantization", "new"):
        settings.refuse(f"model.{name}", "beside a model object, which is already loaded")
    given, dtype = settings.model, str(model.dtype).removeprefix("torch.")
    if "dtype" in given.model_fields_set and given.dtype != dtype:
        raise UserError(f"model.dtype {given.dtype} contradicts the model object, which is in {dtype}")
    path = given.path if "path" in given.model_fields_set else full_path(model.name_or_path)
    return settings.model_copy(update={"model": given.model_copy(update={"dtype": dtype, "path": path})})


def check_place(name: str, start: StartSettings) -> None:
    """Raise a UserError unless the model named by a group of settings is available."""
    try:
        check_start(start)
    except UserError as error:
        raise UserError(f"{name}.path: {error}") from error


def build_rollout_trainer(settings: RolloutRun, inputs: Inputs, processes: Processes) -> RolloutTrainer:
    """Build the trainer of an algorithm that learns from its own responses."""
    # As far as possible, the user's errors are detected before any weights are loaded.
    processes.enter("prepare the data and the rewards")
    if settings.sampling.vllm.transfer == "nccl":
        devices = settings.sampling.vllm.devices if processes.is_main else ()  # others do not take part
        processes.agreed(lambda: NcclGroup.check(processes.device, devices))
    tokenizer = _tokenizer(settings, inputs)
    conversation = conversation_of(settings, tokenizer, inputs.played)
    rewards = _rewards(settings, inputs, processes.device, conversation)
    prompts = prompts_of(settings, tokenizer, conversation, inputs.prompts, settings.row_kind)
    if prompts.held_out is not None and len(prompts.held_out) < processes.count:
        raise UserError(
            f"{counted(len(prompts.held_out), 'held-out prompt')} cannot be shared by {processes.count} "
            "processes; hold out more with data.validation"
        )
    _try_rewards(settings, rewards, prompts, processes.device, conversation)
    teacher = _teacher(settings, tokenizer, processes)
    processes.enter("load the model")
    model = _model(settings, inputs)
    starts_server = settings.sampling.starts_server and processes.is_main and not is_on_ray()
    served = saved_model(model, tokenizer, is_trained=settings.model.lora is None) if starts_server else None
    policy = settings.policy(model)
    _check_full_kl(settings, policy)
    compile = compiler_of(settings.model, processes)
    bare, placing = _placed(policy, settings, processes, compile)
    before = fingerprint(causal(policy.model))
    processes.enter("prepare the sampler")
    parts = _engine_parts(
        settings, prompts, policy, tokenizer, processes, conversation is not None, served, bare, compile
    )
    sampler = settings.sampling.build(parts)
    subtracts = settings.shaping.subtract_query
    mix = Mix(settings.own_share, settings.longest_episode, settings.seed) if settings.own_share < 1 else None
    collector = Collector(
        prompts, sampler, rewards, tokenizer, settings.cleaning, subtracts, conversation, teacher, mix
    )
    kind = OnePassTrainer if settings.has_single_pass else RolloutTrainer
    return kind(
        folder=settings.run,
        learner=Learner(policy, optimizer_of(policy, settings), settings.algorithm, processes),
        tokenizer=tokenizer,
        model_settings=settings.model,
        seed=settings.seed,
        batch_size=settings.batch_size,
        steps=settings.steps,
        fingerprint=before,
        skeleton=bare,
        algorithm=settings.algorithm,
        policy=policy,
        batches=_batches(settings, collector, processes),
        shaping=Shaping(settings.shaping),
        kl_estimator=settings.kl_estimator if settings.algorithm.reads_penalty else None,
        kl=settings.kl,
        kl_coef=settings.kl_coef,
        updates=settings.update,
        held_out=_held_out(settings, collector),
        remarks=[
            *prompts.usage,
            *dropped_prompts(prompts),
            *noted(judged(settings)),
            *placing,
            *noted(turn_end(settings, tokenizer, sampler.eos.tolist())),
            *sampler.remarks(),
            *([] if mix is None else mix.remarks(prompts)),
            *(conversation.notes if conversation is not None else ()),
        ],
    )


def _batches(settings: RolloutRun, collector: Collector, processes: Processes) -> Batches:
    """Return what samples and rewards the batches of a run, ahead of the steps if the settings ask for it."""
    parts: dict[str, Any] = {
        "collector": collector,
        "processes": processes,
        "order": collector.prompts.order(settings.seed, settings.data.shuffle),
        "batch_size": settings.batch_size,
        "samples_per_prompt": settings.samples_per_prompt,
        "temperature": settings.sampling_temperature,
        "steps": settings.steps,
    }
    ahead = settings.sampling.max_staleness
    return BatchesAhead(**parts, ahead=ahead) if ahead else Batches(**parts)


def _held_out(settings: RolloutRun, collector: Collector) -> HeldOut | None:
    """Return the held-out prompts of a run, if it has any, numbered behind those that it trains on."""
    prompts = collector.prompts
    if prompts.held_out is None:
        return None
    most = settings.batch_size * settings.algorithm.max_batches
    # Rewards are compared unshaped, and all responses are the policy's.
    held_out = replace(collector, prompts=prompts.held_out, subtract_query=False, mix=None)
    return HeldOut(held_out, settings.evaluation.every, most, len(prompts))


def _try_rewards(
    settings: RolloutRun,
    rewards: Sequence[Reward],
    prompts: PromptSet,
    device: torch.device,
    conversation: Conversation | None,
) -> None:
    """Try the rewards on the first prompts, in a thread if they will be called in one: signals do not work there."""
    if prompts.held_out is not None:
        check_columns(rewards, prompts.held_out.texts, prompts.held_out.for_rewards)
    with tried(conversation, prompts) as columns:
        if settings.sampling.max_staleness:
            with ThreadPoolExecutor(1, "trial", begin_thread, (device,)) as thread:
                thread.submit(rehearse, rewards, prompts.texts, columns).result()
        else:
            rehearse(rewards, prompts.texts, columns)


def _teacher(settings: RolloutRun, tokenizer: PreTrainedTokenizerBase, processes: Processes) -> TeacherServers | None:
    """Return the teacher of a run that is on servers, if it has one, after a check of its vocabulary."""
    if not settings.teacher_servers:
        return None
    teacher = TeacherServers(settings.teacher_servers)
    processes.agreed(lambda: teacher.check(tokenizer) if processes.is_main else None)
    return teacher


def _model(settings: RolloutRun, inputs: Inputs) -> PreTrainedModel:
    """Load the model that the run starts from, without adapters."""
    _seed_initial_weights(settings.seed)  # adapters are initialised at random
    given = settings.model
    model: PreTrainedModel = prepare(
        inputs.model or load_start(given, given.quantization, settings.maps_weights, given.device)
    )
    return model


def _engine_parts(
    settings: RolloutRun,
    prompts: PromptSet,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    processes: Processes,
    has_turns: bool,
    served: Scratch | None,
    bare: Any,
    compile: Compile | None,
) -> EngineParts:
    """Return what the engine is built from; the arguments that settings do not determine are fields of it."""
    stop = dict.fromkeys([*settings.sampling.stop, *settings.cleaning.stop])
    held_out = prompts.held_out.ids if prompts.held_out is not None else ()
    given = (one.ids for one in prompts.responses)
    check_embedded(policy.model, (*prompts.ids, *held_out, *given))
    start_servers = None
    if settings.sampling.starts_server and is_on_ray():
        from cavesson.cluster.servers import start_servers as start

        start_servers = partial(start, settings)
    return EngineParts(
        sampling=settings.sampling.model_copy(update={"stop": tuple(stop)}),
        policy=policy,
        tokenizer=tokenizer,
        processes=processes,
        served=served,
        bare=bare,
        compile=compile,
        longest=longest_read(settings, policy) if has_turns else max(map(len, (*prompts.ids, *held_out))),
        has_turns=has_turns,
        held_out=len(held_out),
        seed=settings.seed,
        batch_size=settings.batch_size,
        model=settings.model,
        steps=settings.steps,
        folder=settings.run / "sampling",
        start_servers=start_servers,
    )


def _check_full_kl(settings: RolloutRun, policy: Policy) -> None:
    reference = policy.frozen_reference
    if settings.kl_estimator != "full" or reference is None:
        return
    theirs, mine = (output_head(one.model).weight.shape[0] for one in (reference, policy))
    if theirs != mine:
        raise UserError(
            f'kl.estimator "full" compares probabilities of all tokens, and the reference has {theirs:,} of them, the '
            f"policy {mine:,}; use another estimator, or a reference of the same size"
        )


def build_example_trainer(settings: ExampleRun, inputs: Inputs, processes: Processes) -> ExampleTrainer:
    """Build the trainer of an algorithm that learns from given examples."""
    wrong = {"prompts", "rewards", "environment", "tools"} & set(inputs.given)
    if wrong:
        raise UserError(f"this algorithm learns from the examples in data.path; it takes no {min(wrong)}=")
    processes.enter("prepare the data")
    tokenizer = _tokenizer(settings, inputs)
    examples = settings.examples(tokenizer)
    steps = settings.steps_over(examples.train.size)
    if steps is None:
        raise UserError("data.stream: the number of rows is unknown; set steps")
    processes.enter("load the model")
    _seed_initial_weights(settings.seed)  # adapters and new heads are initialised at random
    model = inputs.model or settings.load_model(tokenizer)
    role: Any = settings.role(build_learner(prepare(model), settings.model))
    bare, placing = _placed(role, settings, processes, compiler_of(settings.model, processes))
    before = fingerprint(causal(role.model))
    return ExampleTrainer(
        folder=settings.run,
        learner=Learner(role, optimizer_of(role, settings), settings.algorithm, processes),
        tokenizer=tokenizer,
        model_settings=settings.model,
        seed=settings.seed,
        batch_size=settings.batch_size,
        steps=steps,
        fingerprint=before,
        skeleton=bare,
        remarks=placing,
        settings=settings,
        examples=examples,
    )


def _placed(
    role: Any, settings: RolloutRun | ExampleRun, processes: Processes, compile: Compile | None
) -> tuple[Any, list[str]]:
    """Put a role and its frozen models in place, with equal weights in every process.

    Returns:
        The model without its weights, if they are sharded; and notes for the user on what costs memory or time.
    """
    notes = _whole_reads(role, processes)
    bare = None if processes.mesh is None else skeleton(role.model)
    processes.share_weights(in_memory(role))
    place(role, processes)
    for frozen in role.frozen.values() if isinstance(role, Policy) else ():
        processes.share_weights(in_memory(frozen))
        place(frozen, processes)
    return bare, notes + way_remarks(role, settings.model, processes, compile)


def _whole_reads(role: Any, processes: Processes) -> list[str]:
    """Return a note on models that every process has read as a whole, although they will be sharded."""
    models = {"model": role.model}
    if isinstance(role, Policy):
        models |= {"critic": role.critic, **role.frozen}
    read = [name for name, model in models.items() if model is not None and not is_mapped(model)]
    if processes.mesh is None or not read:
        return []
    return [f"every process reads the whole {' and '.join(read)} before sharding (see Loading in docs/parallel.md)"]


def _seed_initial_weights(seed: int) -> None:
    torch.manual_seed(int(generator(seed, Purpose.INITIAL_WEIGHTS).integers(2**32)))


def _tokenizer(settings: RolloutRun | ExampleRun, inputs: Inputs) -> PreTrainedTokenizerBase:
    """Return a tokenizer that can pad, with the chat template of the settings, which is saved with the model."""
    tokenizer = inputs.tokenizer or settings.load_tokenizer()
    if settings.data.template is not None:
        tokenizer.chat_template = read_template(settings.data.template)
    return with_pad_token(tokenizer, settings.model.path)


def _rewards(
    settings: RolloutRun, inputs: Inputs, device: torch.device, conversation: Conversation | None
) -> tuple[Reward, ...]:
    workers = settings.ray.reward_workers
    if inputs.rewards is None and workers.count and is_on_ray():
        from cavesson.cluster.rewards import remote_rewards

        rewards = remote_rewards(settings.rewards, workers, settings.ray.timeout)
    elif inputs.rewards is None:
        rewards = build_rewards(settings.rewards, device)
    else:
        rewards = inputs.named_rewards
    settings.check_signal(is_rewarded(rewards, conversation))
    return rewards
