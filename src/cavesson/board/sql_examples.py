"""Queries to begin with; a run is offered those whose columns it has."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from cavesson.text.quoting import quoted

METRICS = 4
"""Of the example that shows metrics."""
USUAL = ("reward/mean", "kl/objective", "policy/entropy", "loss/total")
"""Metrics that it shows first."""


class Example(NamedTuple):
    """A query with the name under which the page has a title for it."""

    name: str
    query: str


class Needs(NamedTuple):
    """An example and the columns that it needs, as table.column."""

    name: str
    needs: tuple[str, ...]
    query: str


TRAINED = "coalesce(split, 'train') = 'train'"
NEWEST = f"(SELECT max(step) FROM rows WHERE {TRAINED})"
ALWAYS = (
    Needs(
        "reward",
        ("rows.reward",),
        f"SELECT step, avg(reward) AS reward\nFROM rows\nWHERE {TRAINED}\nGROUP BY step\nORDER BY step",
    ),
    Needs(
        "spread",
        ("rows.reward", "rows.group"),
        f"""SELECT step, avg(spread) AS spread, avg((spread = 0)::INT) AS without_spread
FROM (
  SELECT step, "group", stddev_pop(reward) AS spread
  FROM rows
  WHERE {TRAINED} AND reward IS NOT NULL
  GROUP BY step, "group"
)
GROUP BY step
ORDER BY step""",
    ),
    Needs(
        "best",
        ("rows.reward",),
        """SELECT step, sample, reward, left(response, 200) AS response
FROM rows
WHERE reward IS NOT NULL
ORDER BY reward DESC, step, sample
LIMIT 100""",
    ),
    Needs(
        "finish",
        ("rows.finish_reason", "rows.reward"),
        f"""SELECT finish_reason, count(*) AS rollouts, avg(reward) AS reward
FROM rows
WHERE {TRAINED}
GROUP BY finish_reason
ORDER BY rollouts DESC""",
    ),
    Needs(
        "parts",
        ("rows.reward_parts",),
        f"""SELECT step, part.key AS part, avg(part.value) AS score
FROM (SELECT step, unnest(map_entries(reward_parts)) AS part FROM rows WHERE {TRAINED})
GROUP BY ALL
ORDER BY ALL""",
    ),
    Needs(
        "length",
        ("rows.length", "rows.reward"),
        f"""SELECT step, avg(length) AS length, corr(length, reward) AS correlation
FROM rows
WHERE {TRAINED}
GROUP BY step
ORDER BY step""",
    ),
    Needs(
        "prompts",
        ("rows.reward",),
        f"""SELECT left(prompt, 200) AS prompt, count(*) AS responses, avg(reward) AS reward
FROM rows
WHERE {TRAINED} AND reward IS NOT NULL
GROUP BY ALL
ORDER BY reward, responses DESC
LIMIT 50""",
    ),
    Needs(
        "kl",
        ("rows.kl_k1", "rows.reward"),
        f"""SELECT step, avg(kl_k1) AS kl, avg(reward) AS reward
FROM rows
WHERE {TRAINED}
GROUP BY step
ORDER BY step""",
    ),
    Needs(
        "positions",
        ("tokens.entropy",),
        f"""SELECT position, avg(entropy) AS entropy, count(*) AS tokens
FROM tokens
WHERE step = {NEWEST}
GROUP BY position
ORDER BY position
LIMIT 1000""",
    ),
    Needs(
        "unlikely",
        ("tokens.logprob", "tokens.token_id", "vocabulary.text"),
        f"""SELECT step, sample, position, text, logprob
FROM tokens JOIN vocabulary USING (token_id)
WHERE step = {NEWEST}
ORDER BY logprob
LIMIT 100""",
    ),
    Needs(
        "tools",
        ("turns.name",),
        """SELECT name AS tool, count(*) AS calls, count(error) AS failed, avg(seconds) AS seconds
FROM turns
WHERE role = 'tool'
GROUP BY name
ORDER BY calls DESC""",
    ),
    Needs(
        "rescored",
        ("rescored.reward", "rows.reward"),
        f"""SELECT step, name, avg(again.reward) AS again, avg(rows.reward) AS recorded
FROM rescored AS again JOIN rows USING (step, sample)
WHERE {TRAINED}
GROUP BY ALL
ORDER BY ALL""",
    ),
)
HELD_OUT = Needs(
    "held_out",
    ("rows.reward",),
    f"""SELECT step,
  avg(reward) FILTER ({TRAINED}) AS trained,
  avg(reward) FILTER (split = 'eval') AS held_out
FROM rows
GROUP BY step
ORDER BY step""",
)


def examples(columns: Mapping[str, Collection[str]], held_out: bool) -> list[Example]:
    """Return the examples that work on a run.

    Args:
        columns: the columns with values of each of its tables.
        held_out: whether it has responses to held-out prompts.
    """
    known = {f"{table}.{name}" for table, names in columns.items() for name in names}
    some = [ALWAYS[0], *([HELD_OUT] if held_out else []), *ALWAYS[1:]]
    found = [Example(one.name, one.query) for one in some if known.issuperset(one.needs)]
    return [*found, *_metrics(columns.get("steps", ()))]


def _metrics(names: Collection[str]) -> list[Example]:
    logged = [name for name in names if name not in ("step", "attempt")]
    chosen = sorted(logged, key=lambda name: USUAL.index(name) if name in USUAL else len(USUAL))[:METRICS]
    return (
        [Example("metrics", f"SELECT step, {', '.join(map(quoted, chosen))}\nFROM steps\nORDER BY step")]
        if chosen
        else []
    )
