import json
from pathlib import Path
from typing import Any

import cavesson


def lines(path: Path, *records: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def rows(run: Path, *columns: str) -> list[tuple]:
    table = cavesson.open(run).rows(list(columns))
    return [tuple(row.values()) for row in table.to_pylist(maps_as_pydicts="strict")]
