import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from dressage.record import write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # Names like these are common, and patterns or partitions to a careless reader.
    folder = tmp_path / "step=9" / "run [1] * 'é'"
    folder.mkdir(parents=True)
    write_run(folder, {"algorithm": "ppo", "model": {"name": "some/model", "fingerprint": "f"}})
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An S3-compatible server, in a process of its own."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stderr=-3, stdout=-3
    )
    settings = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    settings |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        _wait_for(process, port)
        import s3fs

        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket"
    finally:
        os.environ.clear()
        os.environ.update(before)
        process.kill()
        process.wait(60)


def _wait_for(process: "subprocess.Popen[bytes]", port: int) -> None:
    """Waits until the server answers as itself: meanwhile others may listen on its port."""
    for _ in range(600):
        assert process.poll() is None, "the server has not started"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/data.json", timeout=10):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server has not started")
