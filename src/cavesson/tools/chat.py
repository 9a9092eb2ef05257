"""A conversation with a model in the terminal: `cavesson generate MODEL --chat`."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, TextStreamer

from cavesson.data.chat import Chat, read_template
from cavesson.data.encode import Asked, Encoder
from cavesson.data.prompts import content_of
from cavesson.data.types import Turn
from cavesson.errors import UserError, print_error
from cavesson.models.parts import causal, position_limit
from cavesson.models.policy import Policy
from cavesson.randomness import Purpose, generator
from cavesson.rollout.conversation import joined
from cavesson.rollout.engines.decoding import check_generate
from cavesson.rollout.engines.responses import StopTexts, eos_token_ids
from cavesson.text.visible import visible
from cavesson.tools.as_trained import at_date_of, check_answered, talk_as_trained, trained_by
from cavesson.tools.chat_tools import ChatTools, Reply
from cavesson.tools.generate import load_policy
from cavesson.tools.settings import TalkSettings


def chat(model: str, settings: TalkSettings) -> None:
    """Answer the lines of standard input until it ends, or until /quit or Ctrl-C.

    Tokens are printed as they are sampled. `/reset` forgets the conversation.

    Raises:
        UserError: there is no model, or no chat template.
    """
    run = trained_by(model)
    check_answered([run], settings.environment)
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
        self.messages: list[dict[str, Any]] = []
        self.chat.render(self.chat.opened([Turn("user", "")]), answer=True)  # reports a missing template early
        check_generate(policy.model)
        self.tools = ChatTools(settings.environment, self.chat)

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages = []

    def answer(self, line: str) -> None:
        """Print the model's answer while it is sampled, and add the line and the answer to the conversation.

        Calls of the model are made, and their results are printed, until it answers without a call.
        """
        messages = [*self.messages, {"role": "user", "content": line}]
        if not self.messages and (text := self.tools.begin()) is not None:
            messages = joined(messages, text)
            print(visible(text))
        turns = 0
        while (reply := self._reply(messages)) is not None:
            turns += 1
            messages += reply.messages
            self.messages = messages
            for turn, _ in reply.results:
                print(visible(f"{turn.name}({turn.arguments}) = {turn.text}"))
            if self.tools.is_done:
                self._end()
            elif reply.results and turns == self.settings.environment.max_turns:
                print(f"(stopped: environment.max_turns is {turns})")
            elif reply.results:
                continue
            return

    def _end(self) -> None:
        reward = self.tools.reward()
        earned = "" if reward is None else f" with a reward of {reward:g}"
        print(f"(the environment ends the episode{earned}; a new conversation begins)")
        self.reset()

    def _reply(self, messages: list[dict[str, Any]]) -> Reply | None:
        """Sample and print the next turn of the model; return None if it does not fit into the model's context."""
        said = self._said(messages)
        if said is None:
            return None
        text = str(self.tokenizer.decode(said, skip_special_tokens=True))
        return self.tools.reply(said, text)

    def _said(self, messages: list[dict[str, Any]]) -> list[int] | None:
        """Sample and print the tokens of the next turn of the model, up to a stop text; return None without room."""
        place = "the conversation"
        (prompt,) = self.encoder.prompts([Asked(place, content_of(messages, place), (), self.tools.schemas)])
        if prompt.problem is not None:
            raise UserError(prompt.problem)
        ids = torch.tensor([prompt.ids], device=self.policy.device)
        length = len(prompt.ids)
        model: Any = causal(self.policy.model)
        limit = position_limit(model.config)
        if limit is not None and length + self.settings.sampling.max_new_tokens > limit:
            print(f"(this conversation no longer fits into the model's {limit} tokens; /reset starts a new one)")
            return None
        # Every turn has its own random numbers, so that answers depend only on the seed and the conversation.
        torch.manual_seed(int(generator(self.settings.seed, Purpose.GLOBAL, step=len(messages)).integers(2**32)))
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=self._generation(),
            tokenizer=self.tokenizer,
            streamer=_Streamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
        sampled: list[int] = whole[0, length:].tolist()
        return sampled[: StopTexts(self.tokenizer, self.settings.sampling.stop).cut(sampled)]

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
