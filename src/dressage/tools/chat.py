"""A conversation in the terminal: what `dressage generate MODEL --chat` does."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from pydantic import Field
from transformers import GenerationConfig, PreTrainedTokenizerBase, TextStreamer

from dressage.data.chat import Chat, read_template
from dressage.data.types import Turn
from dressage.models.policy import Policy, causal
from dressage.sampling.generate import UseSettings, load_policy
from dressage.sampling.randomness import Purpose, generator
from dressage.sampling.sampler import eos_token_ids
from dressage.sampling.settings import SamplingSettings


class TalkSettings(UseSettings):
    """Talk to a model in the terminal."""

    template: str | None = None
    """a chat template instead of the tokenizer's own: a .jinja file, or the template itself"""
    system: str | None = None
    """what the system says first"""
    sampling: SamplingSettings = SamplingSettings(max_new_tokens=512, temperature=0.7, top_p=0.95)
    """how to sample"""
    seed: int = Field(0, ge=0)
    """the same seed gives the same answers to the same turns"""


def chat(model: str, settings: TalkSettings) -> None:
    """Answer the lines of standard input until it ends, or until /quit or Ctrl-C.

    Tokens are printed as they come. `/reset` forgets what was said.

    Raises:
        UserError: there is no model, or no chat template.
    """
    policy, tokenizer = load_policy(model, settings)
    talk = Talk(policy, tokenizer, settings)
    if sys.stdin.isatty():
        print("/reset forgets what was said; /quit, Ctrl-C or Ctrl-D leaves")
    try:
        for line in _lines():
            if line == "/quit":
                break
            if line == "/reset":
                talk.reset()
                print("(forgotten)")
            elif line:
                talk.answer(line)
    except KeyboardInterrupt:
        print()


class Talk:
    """A conversation with a model."""

    def __init__(self, policy: Policy, tokenizer: PreTrainedTokenizerBase, settings: TalkSettings) -> None:
        self.policy, self.tokenizer, self.settings = policy, tokenizer, settings
        self.chat = Chat(tokenizer, read_template(settings.template), settings.system)
        self.turns: list[Turn] = []
        self.chat.render(self.chat.opened([Turn("user", "")]), answer=True)  # a missing template is said before waiting

    def reset(self) -> None:
        """Forget what was said."""
        self.turns = []

    def answer(self, line: str) -> None:
        """Print the model's answer while it is sampled; what was said before is remembered."""
        turns = [*self.turns, Turn("user", line)]
        text = self.chat.render(self.chat.opened(turns), answer=True)
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt").to(self.policy.device)
        length = ids["input_ids"].shape[1]
        model: Any = causal(self.policy.model)
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and length + self.settings.sampling.max_new_tokens > limit:
            print(f"(this conversation no longer fits into the model's {limit} tokens; /reset starts a new one)")
            return
        # Every turn has its own numbers, so that answers depend on nothing but the seed and what was said.
        torch.manual_seed(int(generator(self.settings.seed, Purpose.GLOBAL, step=len(turns)).integers(2**32)))
        whole = model.generate(
            **ids,
            generation_config=self._generation(),
            tokenizer=self.tokenizer,
            streamer=TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
        answer = self.tokenizer.decode(whole[0, length:], skip_special_tokens=True)
        self.turns = [*turns, Turn("assistant", str(answer))]

    def _generation(self) -> GenerationConfig:
        """The settings in the library's names; nothing is taken from the model's own defaults."""
        sampling = self.settings.sampling
        filters = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        return GenerationConfig(
            do_sample=sampling.temperature > 0,
            **(filters if sampling.temperature > 0 else {}),
            repetition_penalty=1.0,
            min_new_tokens=sampling.min_new_tokens,
            max_new_tokens=sampling.max_new_tokens,
            stop_strings=list(sampling.stop) or None,
            eos_token_id=eos_token_ids(self.policy, self.tokenizer, sampling),
            pad_token_id=self.tokenizer.pad_token_id,
        )


def _lines() -> Iterator[str]:
    """The lines that are typed or piped in, without blanks around them."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    import readline  # noqa: F401  gives `input` a history and the arrow keys

    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print()
            return
