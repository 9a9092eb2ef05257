"""The table of all requests that the board handles."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from cavesson.board import (
    compare,
    diagnosis,
    distributions,
    export,
    findings,
    group,
    groups,
    labels,
    live,
    notes,
    overview,
    patterns,
    prompts,
    rescored,
    rollout,
    rows,
    search,
    selection,
    series,
    similar,
    sql,
    sql_tables,
    statistics,
    table,
    tools,
)
from cavesson.board.selection import Query

BINARY = "application/octet-stream"


class Endpoint(NamedTuple):
    """A request: parameters in ``path`` and the query string are validated as ``query`` and passed to ``answer``.

    A heavy one also gets an event, which is set when nobody waits for the answer any more.
    """

    method: str
    path: str
    answer: Callable[..., Any]
    query: type[Query]
    media: str = "application/json"
    heavy: bool = False
    """Whether it waits for its turn, as it takes much memory and time."""
    made_from: Literal["numbers", "texts"] | None = None
    """The part of the index that the answer is made from; ``partial`` of the answer says how complete it was."""


ENDPOINTS = (
    Endpoint("GET", "/api/runs", overview.runs, selection.NoQuery),
    Endpoint("GET", "/api/table", table.table, selection.NoQuery),
    Endpoint("GET", "/api/runs/{run}/info", overview.run_info, selection.RunQuery),
    Endpoint("GET", "/api/runs/{run}/findings", findings.findings, selection.RunQuery),
    Endpoint("GET", "/api/diagnosis", diagnosis.diagnosis, diagnosis.DiagnosisQuery),
    Endpoint("GET", "/api/runs/{run}/series", series.series, series.SeriesQuery, made_from="numbers"),
    Endpoint(
        "GET", "/api/runs/{run}/histogram", distributions.histogram, distributions.HistogramQuery, made_from="numbers"
    ),
    Endpoint("GET", "/api/runs/{run}/ridge", distributions.ridge, distributions.RidgeQuery, made_from="numbers"),
    Endpoint("GET", "/api/runs/{run}/heat", distributions.heat, distributions.HeatQuery, made_from="numbers"),
    Endpoint("GET", "/api/runs/{run}/rows", rows.rows, rows.RowsQuery, made_from="numbers"),
    Endpoint(
        "GET", "/api/runs/{run}/rollouts/{step}/{sample}", rollout.rollout, rollout.RolloutQuery, made_from="numbers"
    ),
    Endpoint("GET", "/api/runs/{run}/rollouts/{step}/{sample}/tokens", rollout.tokens, rollout.RolloutQuery, BINARY),
    Endpoint("GET", "/api/runs/{run}/rollouts/{step}/{sample}/texts", rollout.texts, rollout.RolloutQuery),
    Endpoint("GET", "/api/runs/{run}/hits", search.hits, selection.Selection, made_from="numbers"),
    Endpoint(
        "GET", "/api/runs/{run}/statistics", statistics.statistics, statistics.StatisticsQuery, made_from="numbers"
    ),
    Endpoint("GET", "/api/runs/{run}/groups", groups.groups, groups.GroupsQuery, made_from="numbers"),
    Endpoint("GET", "/api/runs/{run}/groups/{step}/{sample}", group.group, rollout.RolloutQuery, made_from="numbers"),
    Endpoint("GET", "/api/runs/{run}/tools", tools.tools, tools.ToolsQuery, made_from="numbers"),
    Endpoint("GET", "/api/runs/{run}/never-beats", groups.never_beats, groups.NeverBeatsQuery, made_from="numbers"),
    Endpoint("GET", "/api/runs/{run}/prompts", prompts.prompts, prompts.PromptsQuery, made_from="numbers"),
    Endpoint("GET", "/api/runs/{run}/prompts/{prompt}", prompts.prompt, prompts.PromptQuery, made_from="numbers"),
    Endpoint("GET", "/api/runs/{run}/patterns", patterns.patterns, patterns.PatternsQuery, made_from="texts"),
    Endpoint(
        "GET", "/api/runs/{run}/similar/{step}/{sample}", similar.similar, similar.SimilarQuery, made_from="texts"
    ),
    Endpoint("GET", "/api/runs/{run}/export", export.export, export.ExportQuery, export.ALL_MEDIA),
    Endpoint("GET", "/api/runs/{run}/tables", sql_tables.tables, selection.RunQuery),
    Endpoint("POST", "/api/runs/{run}/sql", sql.sql, sql.SqlQuery, heavy=True),
    Endpoint("GET", "/api/runs/{run}/rescored", rescored.rescored, rescored.RescoredQuery, made_from="numbers"),
    Endpoint("GET", "/api/compare", compare.compare, compare.CompareQuery, made_from="numbers"),
    Endpoint("GET", "/api/events", live.events, live.EventsQuery, "text/event-stream"),
    Endpoint("GET", "/api/runs/{run}/labels", labels.labels, selection.RunQuery),
    Endpoint("PUT", "/api/runs/{run}/labels/{step}/{sample}", labels.put, labels.LabelQuery),
    Endpoint("GET", "/api/runs/{run}/notes", notes.notes, selection.RunQuery),
    Endpoint("PUT", "/api/runs/{run}/notes/{step}", notes.put, notes.NoteQuery),
    # Last, as a name can have a slash.
    Endpoint("GET", "/api/runs/{run}", overview.run, selection.RunQuery),
)
