"""A conversation with a model in the terminal: `cavesson generate MODEL --chat`."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, TextStreamer

from cavesson.data.chat import Chat, read_template
from cavesson.data.encode import Asked, Encoder
from cavesson.data.types import Turn
from cavesson.errors import UserError, print_error
from cavesson.models.parts import causal, position_limit
from cavesson.models.policy import Policy
from cavesson.randomness import Purpose, generator
from cavesson.sampling.decoding import check_generate
from cavesson.sampling.responses import StopTexts, eos_token_ids
from cavesson.text.visible import visible
from cavesson.tools.as_trained import at_date_of, check_single_turns, talk_as_trained, trained_by
from cavesson.tools.generate import load_policy
from cavesson.tools.settings import TalkSettings


def chat(model: str, settings: TalkSettings) -> None:
    """Answer the lines of standard input until it ends, or until /quit or Ctrl-C.

    Tokens are printed as they are sampled. `/reset` forgets the conversation.

    Raises:
        UserError: there is no model, or no chat template.
    """
    run = trained_by(model)
    check_single_turns([run])
    settings, line = talk_as_trained(model, settings, run)
    policy, tokenizer = load_policy(model, settings)
    with at_date_of(run):
        talk = Talk(policy, tokenizer, settings)
        if line is not None:
            print_error(line)
        _talk(talk)


def _talk(talk: "Talk") -> None:
    if sys.stdin.isatty():
        print("/reset starts a new conversation; /quit, Ctrl-C or Ctrl-D exits")
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
        self.chat = Chat(
            tokenizer, read_template(settings.template), settings.system, options=settings.template_options
        )
        self.encoder = Encoder(self.chat)
        self.turns: list[Turn] = []
        self.chat.render(self.chat.opened([Turn("user", "")]), answer=True)  # reports a missing template early
        check_generate(policy.model)

    def reset(self) -> None:
        """Forget the conversation."""
        self.turns = []

    def answer(self, line: str) -> None:
        """Print the model's answer while it is sampled, and add the turn and the answer to the conversation."""
        turns = [*self.turns, Turn("user", line)]
        (prompt,) = self.encoder.prompts([Asked("the conversation", tuple(turns))])
        if prompt.problem is not None:
            raise UserError(prompt.problem)
        ids = torch.tensor([prompt.ids], device=self.policy.device)
        length = len(prompt.ids)
        model: Any = causal(self.policy.model)
        limit = position_limit(model.config)
        if limit is not None and length + self.settings.sampling.max_new_tokens > limit:
            print(f"(this conversation no longer fits into the model's {limit} tokens; /reset starts a new one)")
            return
        # Every turn has its own random numbers, so that answers depend only on the seed and the conversation.
        torch.manual_seed(int(generator(self.settings.seed, Purpose.GLOBAL, step=len(turns)).integers(2**32)))
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=self._generation(),
            tokenizer=self.tokenizer,
            streamer=_Streamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
        sampled = whole[0, length:].tolist()
        kept = sampled[: StopTexts(self.tokenizer, self.settings.sampling.stop).cut(sampled)]
        answer = str(self.tokenizer.decode(kept, skip_special_tokens=True))
        self.turns = [*turns, Turn("assistant", answer)]

    def _generation(self) -> GenerationConfig:
        """Convert the settings to transformers' names; the model's own defaults are not used."""
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


class _Streamer(TextStreamer):
    """Prints text as it is sampled; on a terminal, with control characters made visible."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(visible(text) if sys.stdout.isatty() else text, stream_end)


def _lines() -> Iterator[str]:
    """Yield the lines that are typed or piped in, without surrounding white space."""
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
