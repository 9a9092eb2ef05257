from pathlib import Path

import pytest

from cavesson.record import write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # Names like these are common, and patterns or partitions to a careless reader.
    folder = tmp_path / "step=9" / "run [1] * 'é'"
    folder.mkdir(parents=True)
    write_run(folder, {"algorithm": "ppo", "model": {"name": "some/model", "fingerprint": "f"}})
    return folder


@pytest.fixture(scope="module")
def server(object_storage: str) -> str:
    return object_storage
