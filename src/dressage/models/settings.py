"""Which models play which role, and in which numbers."""

from typing import Literal

from pydantic import Field

from dressage.config import Settings


class LoraSettings(Settings):
    """Low-rank adapters (arXiv:2106.09685)."""

    rank: int = Field(16, ge=1)
    """rank of the adapters"""
    alpha: int = Field(32, ge=1)
    """adapters are scaled by alpha / rank"""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """names of the layers that get an adapter, or "all-linear" for all but the output head"""


class ModelSettings(Settings):
    """The policy: the model that learns."""

    path: str = "tiny"
    """a local folder, a Hub name, "package:NAME" for a folder inside an installed Python package, or "tiny" for a
    built-in model of 0.3 million random parameters over bytes"""
    gguf_file: str | None = None
    """name of the GGUF file inside the folder, if the weights come as GGUF"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """numbers of the forward pass; weights that learn are kept in float32 either way"""
    lora: LoraSettings | None = None
    """train low-rank adapters only; without this group every weight is trained"""
    gradient_checkpointing: bool = False
    """compute activations again in the backward pass instead of keeping them: less memory, a third more time"""
    device: str | None = None
    """where to compute: "cpu", "cuda", "cuda:1"; none = a GPU where there is one"""


class ValueSettings(Settings):
    """The critic, which predicts what a response will still earn."""

    kind: Literal["trunk", "separate"] = "trunk"
    """"trunk": a linear head on the policy's own hidden states; "separate": a model of its own"""
    path: str | None = None
    """the separate critic's starting point; none = the policy's"""


class ReferenceSettings(Settings):
    """The model the policy is held close to."""

    kind: Literal["auto", "adapters-off", "copy", "model"] = "auto"
    """"adapters-off": the policy without its LoRA adapters, which costs no memory; "copy": a frozen copy of the
    starting point; "model": another model; "auto": adapters-off with LoRA, else copy"""
    path: str | None = None
    """the other model, for kind "model"; it must use the policy's tokenizer"""
