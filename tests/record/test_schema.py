import pytest

from dressage.record.schema import ROW_COLUMNS, STATISTICS, STEP_COLUMNS, TOKEN_COLUMNS, arrow_schema


@pytest.mark.parametrize("columns", [ROW_COLUMNS, TOKEN_COLUMNS, STEP_COLUMNS])
def test_schema_carries_name_type_doc_and_requiredness_of_every_column(columns):
    schema = arrow_schema(columns)
    assert len(set(schema.names)) == len(columns) == len(schema)
    for column in columns:
        field = schema.field(column.name)
        assert field.type == column.type
        assert field.metadata == {b"doc": column.doc.encode()}
        assert field.nullable is not column.required


def test_statistics_are_row_columns():
    assert set(STATISTICS) <= {column.name for column in ROW_COLUMNS}


def test_required_are_the_key_and_what_every_record_has():
    assert {c.name for c in ROW_COLUMNS if c.required} == {"step", "sample", "prompt", "response", "reward"}
