"""Settings of sampling. With the defaults, the distribution that is sampled from is exactly the one that is scored."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from cavesson.config import ONE_OR_SEVERAL, Settings
from cavesson.registry import EngineEntry, engines

MergesAdapters = Literal["auto", "always", "never"]
"""Whether adapters are merged while responses are sampled."""


class DecodingSettings(Settings):
    """How responses are sampled."""

    temperature: float = Field(1.0, ge=0)
    """divides the logits, both for sampling and for scoring; 0 = always the most likely token (not for training)"""
    top_k: int = Field(0, ge=0)
    """sample only from the k most likely tokens; 0 = off. Filtered sampling makes the KL estimate wrong"""
    top_p: float = Field(1.0, gt=0, le=1)
    """sample only from the smallest set of tokens with at least this probability; 1 = off"""
    min_new_tokens: int = Field(0, ge=0)
    """forbid the end of the response before this many tokens; 0 = off. It makes the KL estimate wrong"""
    max_new_tokens: int = Field(32, ge=1)
    """longest response, in tokens"""
    random_length: tuple[int, int] | None = None
    """draw each response's own limit uniformly from [low, high], both included, instead of max_new_tokens"""
    stop: Annotated[tuple[str, ...], ONE_OR_SEVERAL] = ()
    """texts at which a response ends, such as "###Human"; the text and its tensors are cut before them"""
    eos_token_ids: tuple[int, ...] = ()
    """tokens that end a response; empty = those of the model's generation config and tokenizer"""
    batch_size: int = Field(0, ge=0)
    """responses sampled at the same time; 0 = all of the step. As these end, the next ones begin"""

    @property
    def longest(self) -> int:
        return self.random_length[1] if self.random_length else self.max_new_tokens

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.random_length and not 1 <= self.random_length[0] <= self.random_length[1]:
            raise ValueError(f"random_length must be [low, high] with 1 <= low <= high, not {list(self.random_length)}")
        if self.random_length:
            self.refuse("max_new_tokens", "with random_length; set only one of them")
        if self.temperature == 0:
            for name in ("top_k", "top_p"):
                self.refuse(name, "with temperature 0, which always takes the most likely token")
        if self.min_new_tokens > self.longest:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is above the length limit {self.longest}")
        if "" in self.stop:
            raise ValueError("an empty stop text would end every response at once")
        return self


class VllmSettings(Settings):
    """The vLLM servers that a run samples from."""

    python: str | None = None
    """the Python of the environment that has vLLM; none = the one that runs Cavesson"""
    devices: tuple[int, ...] = ()
    """GPUs of the server that the run starts, such as [4, 5], counted as the machine counts them; they hold the model
    together. They must be set if there are GPUs"""
    arguments: tuple[str, ...] = ()
    """more arguments of the server that the run starts, such as "--gpu-memory-utilization=0.8\""""
    sleep: bool = False
    """let the server that the run starts sleep except while it samples, so that it can share the GPUs of training"""
    transfer: Literal["files", "nccl"] = "files"
    """how servers get new weights: "files": from a folder that they can read; "nccl": from the policy's GPU to theirs,
    for which all weights must be trained"""
    timeout: float = Field(600.0, gt=0)
    """seconds in which a server must answer a request"""
    attempts: int = Field(3, ge=1)
    """attempts per request, if it fails for a reason that may be temporary"""

    @model_validator(mode="after")
    def _check_sleep(self) -> Self:
        if not self.devices:
            self.refuse("sleep", "without devices: vLLM has no sleep mode on a CPU")
        if self.sleep and self.transfer == "nccl":
            raise ValueError('transfer "nccl" cannot be combined with sleep: NCCL connects different GPUs only')
        return self


class SamplingSettings(DecodingSettings):
    """How responses are sampled, and by which engine."""

    engine: str = "transformers"
    """"transformers": the training process samples; "vllm": vLLM does, in a server"""
    merge_adapters: MergesAdapters = "auto"
    """compute with adapters merged into a copy of the weights while responses are sampled, which is faster on a GPU;
    bfloat16 weights are rounded stochastically. "auto" = on a GPU, if the copy takes at most half of its free memory"""
    servers: tuple[str, ...] = ()
    """URLs of running vLLM servers, such as "http://host:8000"; empty = the run starts one on this machine"""
    vllm: VllmSettings = VllmSettings()
    """vLLM"""
    max_staleness: int = Field(0, ge=0)
    """training steps by which the weights that sample a response may be older than those that learn from it; 0 = sample
    and train in turns, above 0 = sample and reward the responses of the next steps during training"""

    @property
    def starts_server(self) -> bool:
        """Whether the run starts its own vLLM server."""
        return self.declared.can("sampling.servers") and not self.servers

    @property
    def declared(self) -> EngineEntry:
        """What the engine cannot do."""
        return engines()[self.engine]

    def build(self, parts: Any) -> Any:
        """Return the `Engine` that is built from `cavesson.rollout.engines.building.EngineParts`, ready to sample."""
        return self.declared.build(parts)

    @field_validator("engine")
    @classmethod
    def _check_engine_name(cls, engine: str) -> str:
        if engine not in engines():
            raise ValueError(f"unknown engine; choose one of {', '.join(engines())}")
        return engine

    @field_validator("servers")
    @classmethod
    def _check_servers(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            import httpx  # slow to import, and few runs name servers

            try:
                parts = httpx.URL(url)
                is_right = parts.scheme in ("http", "https") and bool(parts.host) and not parts.userinfo
            except httpx.InvalidURL:
                is_right = False
            if not is_right:
                raise ValueError(f"{url!r} is not the URL of a server, such as http://host:8000, without a password")
        return tuple(url.rstrip("/") for url in urls)

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        for name, why in self.declared.cannot.items():
            if name.startswith("sampling."):
                self.refuse(name.removeprefix("sampling."), why)
        for name in ("sleep", "python", "devices", "arguments") if self.servers else ():
            self.refuse(f"vllm.{name}", "with servers, which are running already")
        if self.max_staleness and self.vllm.sleep:
            raise ValueError(
                "vllm.sleep cannot be combined with max_staleness: servers would have to sample while the policy learns"
            )
        return self
