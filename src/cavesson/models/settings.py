"""Settings of the models: policy, critic and reference, and of merged ones."""

from typing import Literal, Self

from pydantic import Field, model_validator

from cavesson.config import Settings
from cavesson.config_paths import LocalPath


class LoraSettings(Settings):
    """Low-rank adapters (arXiv:2106.09685)."""

    rank: int = Field(16, ge=1)
    """rank of the adapters"""
    alpha: int = Field(32, ge=1)
    """adapters are scaled by alpha / rank"""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """names of the layers that get an adapter, or "all-linear" for all but the output head"""
    dora: bool = False
    """train the magnitude of every weight column separately from its direction (DoRA, arXiv:2402.09353)"""


class NewModelSettings(Settings):
    """A Llama with random weights, and a tokenizer built from the training texts."""

    vocabulary: Literal["characters", "bytes"] = "characters"
    """one token per character of the texts, or per byte"""
    layers: int = Field(4, ge=1)
    """transformer blocks"""
    hidden_size: int = Field(256, ge=2)
    """width of the hidden states"""
    heads: int = Field(4, ge=1)
    """attention heads; `hidden_size` must be a multiple of twice their number"""
    max_length: int = Field(1024, ge=2)
    """longest sequence"""


class StartSettings(Settings):
    """A model to start from."""

    path: LocalPath = "tiny"
    """a local folder, a run's folder (its adapters are merged into their base), a Hub name, "package:NAME" for a folder
    inside an installed Python package, or "tiny" for a built-in model of 0.3 million random parameters over bytes"""
    gguf_file: str | None = None
    """name of the GGUF file inside the folder, if the weights come as GGUF"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the forward pass; trained weights are always kept in float32"""

    @model_validator(mode="after")
    def _check_gguf_file(self) -> Self:
        if self.path == "tiny":
            self.refuse("gguf_file", 'with path "tiny"; set path to the folder that the file is in')
        return self


class ModelSettings(StartSettings):
    """The model to train."""

    lora: LoraSettings | None = None
    """train low-rank adapters only; none = train every weight"""
    quantization: Literal["nf4", "int8"] | None = None
    """keep the base's weights in 4 or 8 bits (bitsandbytes) and train adapters on them (QLoRA, arXiv:2305.14314)"""
    new: NewModelSettings | None = None
    """start from random weights and a new tokenizer instead of `path`; for `cavesson sft`"""
    gradient_checkpointing: bool | Literal["half", "auto"] = False
    """recompute the activations of all layers in the backward pass instead of keeping them: less memory, a third more
    time; "half": of every second layer; "auto": of as few layers as fit into the free memory of a GPU, as
    `cavesson plan` predicts it"""
    compile: Literal["auto", "none"] = "auto"
    """"auto": on a GPU, compile the layers and the output head for learning, and the layers and the draw for sampling,
    if the model then computes the same; "none": never"""
    device: str | None = None
    """where to compute: "cpu", "cuda", "cuda:1"; none = a GPU if there is one"""

    @property
    def recomputed(self) -> bool | Literal["half"]:
        """Which layers are recomputed; the plan must have chosen them by now."""
        assert self.gradient_checkpointing != "auto"
        return self.gradient_checkpointing

    @model_validator(mode="after")
    def _check_start(self) -> Self:
        if self.new is not None:
            for name in ("path", "gguf_file", "quantization"):
                self.refuse(name, "with new, which starts from random weights")
        if self.path == "tiny":
            self.refuse("quantization", 'with path "tiny", whose weights are random')
        if self.device == "cpu":
            self.refuse("compile", 'with device "cpu", where nothing is compiled')
        if self.quantization is not None:
            self.refuse("compile", "with quantization, whose layers are never compiled")
        if self.quantization is not None and self.lora is None:
            raise ValueError("quantized weights cannot be trained; add model.lora to train adapters on them")
        return self


class OtherModelSettings(Settings):
    """A model besides the one that is trained."""

    path: LocalPath | None = None
    """another model than the starting point, written as `model.path`; it must use the policy's tokenizer"""
    gguf_file: str | None = None
    """name of the GGUF file inside the folder `path`"""

    def start(self, dtype: Literal["float32", "bfloat16"]) -> StartSettings | None:
        """Return the settings of the model at `path`, in the dtype of the policy, or None if there is no path."""
        return None if self.path is None else StartSettings(path=self.path, gguf_file=self.gguf_file, dtype=dtype)

    @model_validator(mode="after")
    def _check_file(self) -> Self:
        if self.path is None:
            self.refuse("gguf_file", "without path, the folder that contains it")
        return self


class ValueSettings(OtherModelSettings):
    """The critic, which predicts the return at each token."""

    kind: Literal["auto", "trunk", "separate"] = "auto"
    """"trunk": a linear head on the policy's own hidden states; "separate": another model, which starts from
    `path`, else from the policy; "auto": separate with a path, else trunk"""
    path: LocalPath | None = None
    """the model that a separate critic starts from, written as `model.path`; from a reward model (a run, or a folder of
    a sequence classifier with one output) it takes the head too, as InstructGPT does (arXiv:2203.02155)"""

    @property
    def is_separate(self) -> bool:
        """Whether the critic is a separate model."""
        return self.kind == "separate" or self.path is not None

    @model_validator(mode="after")
    def _check_path(self) -> Self:
        if self.kind == "trunk":
            self.refuse("path", 'with kind "trunk"; remove one of them')
        return self


class ReferenceSettings(OtherModelSettings):
    """The model that the policy is kept close to."""

    kind: Literal["auto", "adapters-off", "copy", "model", "none"] = "auto"
    """"adapters-off": the policy without its LoRA adapters, which costs no memory; "copy": a frozen copy of the
    starting point; "model": the model of `path`; "none": KL is neither penalised nor measured; "auto": model with a
    path, else adapters-off with LoRA, else copy"""

    def resolved(self, has_adapters: bool) -> Literal["adapters-off", "copy", "model", "none"]:
        """Return the kind, with "auto" resolved."""
        if self.kind != "auto":
            return self.kind
        if self.path is not None:
            return "model"
        return "adapters-off" if has_adapters else "copy"

    @model_validator(mode="after")
    def _check_path(self) -> Self:
        if self.kind not in ("auto", "model"):
            self.refuse("path", f'with kind "{self.kind}"; remove one of them')
        if self.kind == "model" and self.path is None:
            raise ValueError('kind "model" needs path')
        return self


class TeacherSettings(OtherModelSettings):
    """The model that the policy learns from, in this process or on servers."""

    path: LocalPath | None = None
    """the teacher, written as `model.path`; it must use the policy's tokenizer"""
    servers: tuple[str, ...] = ()
    """URLs of vLLM servers that have the teacher, such as ["http://host:8000"], instead of `path`; VLLM_API_KEY in the
    environment is their key, if they need one"""

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.servers:
            self.refuse("path", "beside servers, which have the teacher; remove one of them")
        return self


class FrozenSettings(OtherModelSettings):
    """The model that a policy is compared with, if it is only needed before training."""


class MergeSettings(Settings):
    """Merge an adapter into its base model."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the merged weights; auto = that of the base model if it is one of these, else float32"""
