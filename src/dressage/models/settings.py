"""Which models play which role, and in which numbers."""

from typing import Literal, Self

from pydantic import Field, model_validator

from dressage.config import Settings


class LoraSettings(Settings):
    """Low-rank adapters (arXiv:2106.09685)."""

    rank: int = Field(16, ge=1)
    """rank of the adapters"""
    alpha: int = Field(32, ge=1)
    """adapters are scaled by alpha / rank"""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """names of the layers that get an adapter, or "all-linear" for all but the output head"""
    dora: bool = False
    """learn the length of every weight column apart from its direction (DoRA, arXiv:2402.09353)"""


class NewModelSettings(Settings):
    """A Llama of random weights, and a tokenizer made of the texts it is to learn from."""

    vocabulary: Literal["characters", "bytes"] = "characters"
    """one token per character of the texts, or per byte"""
    layers: int = Field(4, ge=1)
    """transformer blocks"""
    hidden_size: int = Field(256, ge=2)
    """width of the hidden states"""
    heads: int = Field(4, ge=1)
    """attention heads; they divide the width"""
    max_length: int = Field(1024, ge=2)
    """longest sequence"""


class StartSettings(Settings):
    """A model to begin from."""

    path: str = "tiny"
    """a local folder, a run's folder (its adapters are merged into their base), a Hub name, "package:NAME" for a folder
    inside an installed Python package, or "tiny" for a built-in model of 0.3 million random parameters over bytes"""
    gguf_file: str | None = None
    """name of the GGUF file inside the folder, if the weights come as GGUF"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """numbers of the forward pass; weights that learn are kept in float32 either way"""


class ModelSettings(StartSettings):
    """The model that learns."""

    lora: LoraSettings | None = None
    """train low-rank adapters only; without this group every weight is trained"""
    quantization: Literal["nf4", "int8"] | None = None
    """keep the base's weights in 4 or 8 bits (bitsandbytes) and train adapters on them (QLoRA, arXiv:2305.14314)"""
    new: NewModelSettings | None = None
    """start from random weights and a new tokenizer instead of `path`; for `dressage sft`"""
    gradient_checkpointing: bool = False
    """compute activations again in the backward pass instead of keeping them: less memory, a third more time"""
    device: str | None = None
    """where to compute: "cpu", "cuda", "cuda:1"; none = a GPU where there is one"""

    @model_validator(mode="after")
    def _check_quantization(self) -> Self:
        if self.quantization is not None and self.lora is None:
            raise ValueError("quantized weights cannot learn; add model.lora, which learns on them")
        return self


class ValueSettings(Settings):
    """The critic, which predicts what a response will still earn."""

    kind: Literal["trunk", "separate"] = "trunk"
    """"trunk": a linear head on the policy's own hidden states; "separate": a model of its own"""
    path: str | None = None
    """the separate critic's starting point; none = the policy's"""


class ReferenceSettings(Settings):
    """The model the policy is held close to."""

    kind: Literal["auto", "adapters-off", "copy", "model", "none"] = "auto"
    """"adapters-off": the policy without its LoRA adapters, which costs no memory; "copy": a frozen copy of the
    starting point; "model": another model; "none": KL is neither penalised nor measured; "auto": adapters-off with
    LoRA, else copy"""
    path: str | None = None
    """the other model, for kind "model"; it must use the policy's tokenizer"""


class FrozenSettings(Settings):
    """The model a policy is compared with, where all that is needed of it is computed before training."""

    path: str | None = None
    """another model than the starting point; it must use the policy's tokenizer"""
