"""A trial of the environments of a run: `reset` and `get_reward` with rows of the data."""

from collections.abc import Sequence

from cavesson.check.reward import spread_out
from cavesson.check.scoring import TASKS
from cavesson.data.prompts import PromptSet
from cavesson.errors import UserError
from cavesson.findings.finding import Finding, Fine, Results, SkippedCheck
from cavesson.findings.words import number
from cavesson.rollout.conversation import Conversation
from cavesson.rollout.environments import COLUMN, Environments, Kind, NoEnvironment
from cavesson.rollout.episodes import Episode

_QUOTED = 60


def rows_of(environments: Environments, kind: Kind, prompts: PromptSet) -> list[int]:
    """Return the rows of the data that an environment is tried with, evenly spaced."""
    names = prompts.columns.get(COLUMN, (None,) * len(prompts))
    own = [row for row, name in enumerate(names) if environments.of({COLUMN: name}) is kind]
    return [own[i] for i in spread_out(len(own), TASKS)]


def check_environments(conversation: Conversation, prompts: PromptSet) -> Results:
    """Begin episodes of every environment, and ask for the rewards of those in which nothing happens."""
    for kind in conversation.environments.kinds.values():
        if isinstance(kind.probe, NoEnvironment):
            continue
        rows = rows_of(conversation.environments, kind, prompts)
        if rows:
            yield from _tried(conversation, prompts, kind, rows)
        else:
            yield SkippedCheck("environment-reset", f"no row of the data names the environment {kind.name}")


def _tried(conversation: Conversation, prompts: PromptSet, kind: Kind, rows: Sequence[int]) -> Results:
    try:
        episodes = conversation.begin(prompts, rows, rows)
    except UserError as error:
        yield Finding(
            "environment-reset",
            "error",
            f"The environment {kind.label} cannot begin an episode",
            _first_failure(conversation, prompts, rows) or str(error),
            "fix `reset`, or the row of the data",
        )
        return
    worlds = [one.world for one in episodes]
    yield Fine("environment-reset", len(rows), f"rows of the data with which {kind.label} has begun an episode")
    yield _added(kind, prompts, episodes)
    try:
        given = conversation.rewards(worlds, [()] * len(worlds)).get(kind.label) if kind.scores else None
    except UserError as error:
        yield Finding(
            "environment-reward",
            "error",
            f"The environment {kind.label} cannot score an episode in which nothing was said",
            str(error),
            "a policy may say nothing: return the lowest reward, or None for an episode that is not scored",
        )
        return
    finally:
        conversation.release(worlds)
    if given is not None:
        known = [one for one in given if one is not None]
        seen = f"{number(min(known))} to {number(max(known))}" if known else "not scored"
        yield Fine("environment-reward", seen, f"get_reward of {kind.label} where nothing was said")


def _first_failure(conversation: Conversation, prompts: PromptSet, rows: Sequence[int]) -> str | None:
    for row in rows:
        try:
            conversation.release([one.world for one in conversation.begin(prompts, [row], [row])])
        except UserError as error:
            return f"Row {row + 1}: {error}"
    return None


def _added(kind: Kind, prompts: PromptSet, episodes: Sequence[Episode]) -> Fine:
    """Report what `reset` adds to the prompts."""
    added = []
    for one in episodes:
        before = (prompts.messages[one.index] if prompts.messages else None) or []
        pairs = zip(one.messages, before, strict=True)
        added += [str(new["content"])[len(str(old["content"])) :] for new, old in pairs if new != old]
    first = "" if not added else f", such as “{added[0][:_QUOTED]}{'…' if len(added[0]) > _QUOTED else ''}”"
    return Fine(
        "environment-text", f"{len(added)} of {len(episodes)}{first}", f"prompts to which {kind.label} adds a text"
    )
