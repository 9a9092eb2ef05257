import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An S3-compatible server, in a process of its own, at a port that it takes itself."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    before = dict(os.environ)
    try:
        settings = {"AWS_ENDPOINT_URL": _address(process, log), "AWS_DEFAULT_REGION": "us-east-1"}
        settings |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "true"}
        os.environ.update(settings)
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()  # one made earlier keeps the address of its own server
        try:
            s3fs.S3FileSystem().mkdir("bucket")
        except OSError as error:
            raise AssertionError(f"exit code {process.poll()}: {log.read_text()}") from error
        yield "s3://bucket"
    finally:
        os.environ.clear()
        os.environ.update(before)
        process.kill()
        process.wait(60)


def _address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Waits until the server says where it listens."""
    for _ in range(1200):
        said = re.search(r"Running on (http://\S+)\n", log.read_text())
        if said:
            return said.group(1)
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(f"the server has not started: {log.read_text()}")
