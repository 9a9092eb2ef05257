"""Responses for the examination of a reward, from the recipe's data or a file of pairs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from cavesson.check.reward import Said, spread_out
from cavesson.data.chat import Chat
from cavesson.data.load import load
from cavesson.data.types import Demonstration, Pair, Prompt, Turn
from cavesson.data.types import Said as Text
from cavesson.data.view import AnyDataSettings
from cavesson.errors import UserError
from cavesson.record import open as open_run
from cavesson.rewards.settings import RewardSettings


def read_said(
    settings: AnyDataSettings, tokenizer: PreTrainedTokenizerBase, wanted: int
) -> tuple[list[Said], dict[str, list[Any]]]:
    """Read responses with their prompts, and the columns a reward may use; none if the data has only prompts.

    Held-out rows are used if there are any. For prompts, the right answer (`ground_truth`) is used as the response.

    Raises:
        UserError: the data cannot be read.
    """
    kind = _kind(settings)
    loaded = load(settings, kind or Prompt)
    rows: Sequence[Any] = loaded.held_out or loaded.train
    if kind is None:
        rows = [row for row in rows if row.columns.get("ground_truth")]
    chosen = [rows[i] for i in spread_out(len(rows), wanted)]
    chat = Chat.of(settings, tokenizer)
    if not chosen:
        return [], {}
    return [_said(row, chat) for row in chosen], _columns(settings, chosen)


def unlearned(data: AnyDataSettings, rewards: Sequence[RewardSettings]) -> AnyDataSettings:
    """Return the data; if it is the data of a reward model's run, or no data is given, as that run read it.

    The rows that the run held out are then held out again: pairs that a reward model was trained on cannot test it.
    """
    for path in (Path(str(reward.options["path"])) for reward in rewards if "path" in reward.options):
        if (path / "run.json").exists():
            own = AnyDataSettings.model_validate(open_run(path).info["config"]["data"])
            if data.path in (None, own.path) and not data.mix:
                return own
    return data


def _kind(settings: AnyDataSettings) -> Any:
    """Return Pair or Demonstration if the data has responses, even if the run reads only prompts; otherwise None."""
    for kind in (Pair, Demonstration):
        try:
            first: Any = load(settings.model_copy(update={"max_rows": 1, "validation": 0.0}), kind).train[0]
        except UserError:
            continue
        if first.prompt:  # a plain text would be a response to an empty prompt
            return kind
    return None


def _columns(settings: AnyDataSettings, rows: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the other columns of the same rows, read as prompts, or none if they cannot be read as prompts."""
    try:
        prompts = {_key(row.prompt): row.columns for row in load(settings, Prompt).train}
    except UserError:
        return {}
    found = [prompts.get(_key(row.prompt), {}) for row in rows]
    names = dict.fromkeys(name for columns in found for name in columns)
    return {name: [columns.get(name) for columns in found] for name in names if name not in ("prompts", "responses")}


def _key(said: Text) -> str:
    return said if isinstance(said, str) else repr(said)


def _said(row: Pair | Demonstration | Prompt, chat: Chat) -> Said:
    prompt = chat.turns(row.prompt, "user")
    text = prompt if isinstance(prompt, str) else chat.render(chat.opened(prompt), answer=True)
    if isinstance(row, Pair):
        return Said(text, _response(row.chosen), _response(row.rejected))
    if isinstance(row, Prompt):
        return Said(text, str(row.columns["ground_truth"]))
    return Said(text, _response(row.response))


def _response(said: Text | Sequence[Turn]) -> str:
    return said if isinstance(said, str) else said[-1].content
