import re
from pathlib import Path

import pytest

from cavesson.record.rollups import ROLLUP_SCHEMA
from cavesson.record.schema import ROW_COLUMNS, STEP_COLUMNS, TOKEN_COLUMNS, TURN_COLUMNS, arrow_schema
from cavesson.record.write.statistics import STATISTICS


@pytest.mark.parametrize("columns", [ROW_COLUMNS, TOKEN_COLUMNS, TURN_COLUMNS, STEP_COLUMNS])
def test_schema_carries_name_type_doc_and_requiredness_of_every_column(columns):
    schema = arrow_schema(columns)
    assert len(set(schema.names)) == len(columns) == len(schema)
    for column in columns:
        field = schema.field(column.name)
        assert field.type == column.type
        assert field.metadata == {b"doc": column.doc.encode()}
        assert field.nullable is (not column.required or column.name == "reward")  # which no part may judge


def test_statistics_are_row_columns():
    assert set(STATISTICS) <= {column.name for column in ROW_COLUMNS}


def test_required_are_the_key_and_what_every_record_has():
    assert {c.name for c in ROW_COLUMNS if c.required} == {"step", "sample", "prompt", "response", "reward"}


TYPES = {"double": "float64", "float": "float32", "list<item: int32>": "list of int32", "bool": "bool"}
TYPES |= {"map<string, double>": "map string → float64", "map<string, string>": "map string → string"}


def documented(title: str) -> dict[str, tuple[str, bool]]:
    """The columns that a table of docs/record.md names: their types, and whether they are bold."""
    text = (Path(__file__).parents[2] / "docs" / "record.md").read_text(encoding="utf-8")
    found = {}
    for line in text.split(f"### `{title}`")[1].split("\n\n", 2)[1].splitlines()[2:]:
        names, type_ = line.split("|")[1:3]
        found |= {name: (type_.strip(), "**" in names) for name in re.findall(r"`(\w+)`", names)}
    return found


@pytest.mark.parametrize(
    ("title", "columns"), [("rows", ROW_COLUMNS), ("tokens", TOKEN_COLUMNS), ("turns", TURN_COLUMNS)]
)
def test_every_column_is_documented_as_it_is(title, columns):
    assert documented(title) == {c.name: (TYPES.get(str(c.type), str(c.type)), c.required) for c in columns}


def test_every_column_of_the_rollups_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "record.md").read_text(encoding="utf-8")
    table = text.split("## Roll-ups")[1].split("| column | type |")[1].split("\n\n")[0]
    assert (
        re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines()[2:])) == ROLLUP_SCHEMA.names
    )
