"""Paths that cannot be written or read, and files that must not grow: one plain line, and nothing left behind."""

import json
import resource
from functools import partial
from pathlib import Path

import pytest
from cli_helpers import Done, cavesson, fresh

import cavesson as package
from cavesson.record import Recorder, write_run
from cavesson.record.write import lock


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = fresh(tmp_path / "here")
    (folder / "responses.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    (folder / "dangling").symlink_to("nowhere/at/all")
    write_run(folder / "old", {"algorithm": "ppo"})
    with Recorder(folder / "old", attempt=0) as recorder:
        recorder.metrics(0, {"loss": 1.0})
    return folder


MAP = ["--map", "prompt=prompt", "--map", "response=response"]
COMMANDS = {
    "train": ["ppo", "recipe.toml", "--run", "{path}"],
    "demo": ["demo", "--run", "{path}", "--model.path", "tiny"],
    "import": ["import", "responses.jsonl", "{path}", *MAP],
    "import and follow": ["import", "responses.jsonl", "{path}", *MAP, "--follow", "--until-idle", "0.1"],
    "export": ["export", "old", "{path}"],
    "score": ["score", "responses.jsonl", "--rewards", "lowercase", "--out", "{path}.jsonl"],
    "generate": ["generate", "tiny", "--prompt", "A", "--out", "{path}.jsonl"],
    "compare": ["compare", "tiny", "other", "--prompts", "prompts.txt", "--out", "{path}"],
    "evaluate": ["evaluate", "tiny", "--text.path", "prompts.txt", "--out", "{path}.json"],
    "doctor": ["doctor", "old", "--html", "{path}"],
}
PLACES = {
    "below a file": ("recipe.toml/new", "recipe.toml"),
    "a name that is too long": ("n" * 300, "File name too long"),
    "a path that is too long": ("/".join(["n" * 100] * 50), "File name too long"),
    "below a link to nothing": ("dangling/new", "dangling"),
    "where no file can be": ("/proc/new", "/proc/new"),
}


def paths(folder: Path) -> list[str]:
    """Return what is in a folder, without what the test itself and Python write there."""
    own = {".out", ".err", ".operations", "__pycache__"}
    return sorted(str(path) for path in folder.rglob("*") if own.isdisjoint(path.parts))


def refused(folder: Path, command: str, path: str, part: str) -> None:
    before = paths(folder)
    done = cavesson(folder, *(word.format(path=path) for word in COMMANDS[command]))
    assert done.code == 2, done
    assert done.err.startswith("cavesson: ") and len(done.err.splitlines()) == 1, done.err
    assert part in done.err
    assert paths(folder) == before


@pytest.mark.sampled(10)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", COMMANDS)
def test_places_that_cannot_be_written(folder: Path, command: str, place: str) -> None:
    refused(folder, command, *PLACES[place])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_read_only_file_system(folder: Path, read_only: Path, command: str) -> None:
    refused(folder, command, f"{read_only}/runs/new", "Read-only file system")


READING = {
    "a recipe": ["ppo", "{path}"],
    "data": ["ppo", "recipe.toml", "--data.path", "{path}"],
    "a model": ["ppo", "recipe.toml", "--model.path", "{path}"],
    "a reward": ["ppo", "recipe.toml", "--rewards", '[{{use = "{path}.py:f"}}]'],
    "a reward model": ["ppo", "recipe.toml", "--rewards", '[{{use = "classifier", options = {{path = "{path}"}}}}]'],
    "a run to resume": ["ppo", "--resume", "{path}"],
    "a run": ["show", "{path}"],
    "a run to compact": ["compact", "{path}"],
    "a run to score": ["rescore", "{path}", "--rewards", "lowercase"],
    "a run to diagnose": ["doctor", "{path}"],
    "rules": ["doctor", "old", "--rules", "{path}"],
    "a source": ["import", "{path}", "new"],
    "responses": ["score", "{path}", "--rewards", "lowercase"],
}  # fmt: skip


@pytest.mark.sampled(10)
@pytest.mark.parametrize("path", ["recipe.toml/inside", "n" * 300, "./dangling", "old/record"])
@pytest.mark.parametrize("what", READING)
def test_places_that_cannot_be_read(folder: Path, what: str, path: str) -> None:
    done = cavesson(folder, *(word.format(path=path) for word in READING[what]))
    assert done.code == 2, done
    assert done.err.startswith("cavesson: ") and len(done.err.splitlines()) <= 2, done.err
    assert not (folder / "run").exists() and not (folder / "new").exists()


def limited(folder: Path, size: int, *arguments: str, heartbeat: float = lock.HEARTBEAT) -> Done:
    """A command whose files may not become larger than so many bytes."""
    return cavesson(folder, *arguments, before=partial(limit, size, heartbeat))


def limit(size: int, heartbeat: float) -> None:
    lock.HEARTBEAT = heartbeat
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.slow
@pytest.mark.parametrize("heartbeat", [lock.HEARTBEAT, 0.0])
def test_a_run_that_could_write_nothing_leaves_no_folder(folder: Path, heartbeat: float) -> None:
    """Also if the file with the heartbeats is written while the folder is removed."""
    for _ in range(3):
        done = limited(folder, 2_000, "ppo", "recipe.toml", "--checkpoint.every", "1", heartbeat=heartbeat)
        assert done.code == 2, done
        assert done.err.splitlines()[-1].startswith("cavesson: the limit on the size of a file is reached"), done.err
        assert "Traceback" not in done.err
        assert not (folder / "run").exists()


@pytest.mark.slow
def test_a_limit_on_the_size_of_files_is_like_a_full_disk(folder: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    whole = cavesson(folder, "ppo", "recipe.toml")
    assert whole.code == 0, whole.err
    size = max(path.stat().st_size for path in (folder / "run" / "model").iterdir())
    assert package.open(folder / "run").rows().num_rows == 8
    done = limited(folder, size // 2, "ppo", "recipe.toml", "--run", "again")
    assert done.code == 2 and "the limit on the size of a file is reached" in done.err, done.err
    assert "--resume" in done.err
    done = cavesson(folder, "ppo", "--resume", "again")
    assert done.code == 0, done.err
