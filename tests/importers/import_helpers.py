import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import cavesson


def lines(path: Path, *records: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def restored(line: str) -> bytes | None:
    """The bytes of a rejected line, from its line in ``rejected.jsonl``; None where they are in the source only."""
    kept = json.loads(line)
    if "base64" in kept:
        return b64decode(kept["base64"])
    text: str | None = kept.get("text")
    return None if text is None else text.encode()


def rows(run: Path, *columns: str) -> list[tuple]:
    table = cavesson.open(run).rows(list(columns))
    return [tuple(row.values()) for row in table.to_pylist(maps_as_pydicts="strict")]
