"""Episodes with tools and an environment, played by an engine that follows a script."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from rollout_helpers import Script, chat, tokenizer

from cavesson.data.prompts import PromptSet, given_prompts
from cavesson.data.settings import PromptSettings
from cavesson.errors import UserError
from cavesson.rollout.conversation import Conversation
from cavesson.rollout.episodes import Episode, Played, play
from cavesson.rollout.loading import Given, load_environments
from cavesson.rollout.settings import EnvironmentSettings

NAME = "qwen2_5"
TOKENIZER = tokenizer(NAME)


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


def slow(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "waited"


class Counter:
    """Counts, speaks as the user, and scores."""

    done = False

    def reset(self, start: int, **row: Any) -> str | None:
        self.value = start
        self.done = False
        return f" You start at {start}." if start else None

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: what is added
        """
        self.value += number
        self.done = self.value > 100
        return f"now {self.value}"

    def get_reward(self) -> float | None:
        return float(self.value)


class Talker(Counter):
    """A counter with a user."""

    said = 0

    def reset(self, start: int, **row: Any) -> str | None:
        self.said = 0
        return super().reset(start)

    def user_reply(self) -> str | None:
        self.said += 1
        return "Go on." if self.said < 3 else None


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def played(
    texts: list[list[str]],
    *,
    tools: Sequence[Any] = (),
    environment: Any = None,
    starts: Sequence[int] = (),
    max_tokens: int = 400,
    **settings: Any,
) -> tuple[list[Episode], Played, Script, Conversation]:
    conversation, prompts = made(len(texts), tools, environment, starts, max_tokens, **settings)
    engine = Script(TOKENIZER, dict(enumerate(texts)))
    episodes = conversation.begin(prompts, range(len(texts)), range(len(texts)))
    columns = play(engine, episodes, 3, None, conversation)
    return episodes, columns, engine, conversation


def made(
    count: int, tools: Sequence[Any], environment: Any, starts: Sequence[int], max_tokens: int, **settings: Any
) -> tuple[Conversation, PromptSet]:
    chosen = EnvironmentSettings(max_tokens=max_tokens, **settings)
    environments = load_environments(chosen, Given(environment, tools))
    conversation = Conversation(chosen, environments, chat(NAME), max_tokens, 3000)
    asked = [[{"role": "user", "content": f"Question {row}."}] for row in range(count)]
    columns: dict[str, Any] = {"prompt": asked} | ({"start": list(starts)} if starts else {})
    data = PromptSettings(max_prompt_tokens=3000)
    return conversation, given_prompts(columns, data, TOKENIZER, conversation.offer)


def whole(episode: Episode, tools: Any) -> list[int]:
    """The ids of the whole conversation, as the template writes it."""
    text = TOKENIZER.apply_chat_template(episode.messages, tools=tools, tokenize=False)
    ids: list[int] = TOKENIZER(text)["input_ids"]
    return ids


def test_an_episode_is_its_conversation_token_for_token() -> None:
    texts = [
        [call("multiply", a=6, b=7), "It is 42."],
        ["I know."],
        [call("multiply", a=2, b=3), call("multiply", a=6, b=9), "54."],
    ]
    episodes, columns, engine, conversation = played(texts, tools=[multiply])
    tools = conversation.environments.kinds[None].tools.values()
    schemas = [tool.schema for tool in tools]
    for row, episode in enumerate(episodes):
        expected = whole(episode, schemas)
        ids = [*episode.prompt, *episode.ids]
        assert ids == expected[: len(ids)]
        assert TOKENIZER.decode(expected[len(ids) :]).strip() == ""  # the template's newline after the last turn
        assert episode.reason == "eos"
        sampled = [token for token, source in zip(episode.ids, episode.sources, strict=True) if source == 0]
        written = [token for text in texts[row] for token in [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]]
        assert sampled == written
        assert columns.learned[row].sum() == len(written)
    # Each later turn continues from exactly the tokens of the turns before it.
    assert engine.seen[2][2] == [*episodes[2].prompt, *episodes[2].ids[: -len(TOKENIZER("54.")["input_ids"]) - 1]]
    told = [(turn.role, turn.name, turn.text) for turn in episodes[0].turns]
    assert told[1:] == [("tool", "multiply", "42"), ("assistant", None, "It is 42.")]
    result = episodes[0].turns[1]
    assert TOKENIZER.decode(episodes[0].ids[result.first_token : result.first_token + result.tokens]) == "42"
    assert result.arguments is not None and json.loads(result.arguments) == {"a": 6, "b": 7}


def test_mistakes_of_the_model_are_told_to_it_and_recorded() -> None:
    texts = [
        [call("divide", a=1), "Sorry."],
        [call("multiply", a="x", b=2), "Sorry."],
        ['<tool_call>\n{"name": "multiply", \n</tool_call>', "Sorry."],
    ]
    episodes, _, _, _ = played(texts, tools=[multiply])
    for episode in episodes:
        turn = episode.turns[1]
        assert turn.role == "tool" and turn.error
        assert json.loads(turn.text)["error"]
        assert episode.reason == "eos" and len(episode.turns) == 3


def test_an_environment_begins_ends_and_scores_episodes() -> None:
    texts = [[call("add", number=5), "Done."], [call("add", number=200), "never said"]]
    episodes, _, engine, conversation = played(texts, environment=Counter, starts=[0, 10])
    assert [one.reason for one in episodes] == ["eos", "done"]
    assert "You start at 10." in TOKENIZER.decode(episodes[1].prompt)
    assert "You start" not in TOKENIZER.decode(episodes[0].prompt)
    assert engine.turns == {0: 2, 1: 1}
    given = conversation.rewards([one.world for one in episodes], [one.turns for one in episodes])
    assert given == {"Counter": [5.0, 210.0]}
    assert [one.turns[-1].text for one in episodes] == ["Done.", "now 210"]


def test_a_user_replies_until_it_is_satisfied_or_turns_run_out() -> None:
    texts = [["one", "two", "three", "four"]] * 2
    episodes, columns, _, _ = played(texts, environment=Talker, starts=[0, 0], max_turns=9)
    assert [turn.text for turn in episodes[0].turns] == ["one", "Go on.", "two", "Go on.", "three"]
    assert episodes[0].reason == "eos" and columns.ended.tolist() == [1.0, 1.0]
    episodes, columns, _, _ = played(texts, environment=Talker, starts=[0, 0], max_turns=2)
    assert [turn.text for turn in episodes[0].turns] == ["one", "Go on.", "two"]
    assert [one.reason for one in episodes] == ["turns", "turns"] and columns.ended.tolist() == [0.0, 0.0]


def test_an_answer_in_the_last_turn_ends_an_episode_by_itself_and_a_call_does_not() -> None:
    asked = call("multiply", a=6, b=7)
    texts = [[asked, "42"], [asked, asked]]
    episodes, columns, _, _ = played(texts, tools=[multiply], starts=[0, 0], max_turns=2)
    assert [one.reason for one in episodes] == ["eos", "turns"] and columns.ended.tolist() == [1.0, 0.0]


def test_an_episode_ends_where_its_tokens_do() -> None:
    said = "a long answer " * 6
    size = len(TOKENIZER(said)["input_ids"])
    episodes, columns, _, _ = played([[said]], tools=[multiply], max_tokens=size - 3)
    assert episodes[0].reason == "length" and columns.learned.sum() == size - 3
    # There is room for the call, and not for its result.
    asked = call("multiply", a=6, b=7)
    episodes, columns, _, _ = played(
        [[asked, "x"]], tools=[multiply], max_tokens=len(TOKENIZER(asked)["input_ids"]) + 2
    )
    assert episodes[0].reason == "length"
    assert [(turn.role, turn.tokens) for turn in episodes[0].turns][1] == ("tool", 0)
    assert columns.attended.equal(columns.learned)


def test_a_slow_tool_holds_up_its_own_episode_only() -> None:
    texts = [[call("slow", seconds=3.5), "Late."], [call("multiply", a=1, b=2), call("multiply", a=3, b=4), "Soon."]]
    _, _, engine, _ = played(texts, tools=[multiply, slow])
    assert engine.rounds[0] == [0, 1]
    assert engine.rounds.index([0]) > engine.rounds.index([1]) + 1


def test_a_tool_that_takes_too_long_is_an_error_that_the_model_sees() -> None:
    episodes, _, _, _ = played([[call("slow", seconds=30.0), "Well."]], tools=[slow], timeout=0.2)
    assert "0.2 s" in json.loads(episodes[0].turns[1].text)["error"]


def test_plain_prompts_have_no_tools() -> None:
    conversation, _ = made(1, [multiply], None, (), 100)
    with pytest.raises(UserError, match=r"plain text.*data\.chat"):
        given_prompts(["a text"], PromptSettings(), TOKENIZER, conversation.offer)


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
