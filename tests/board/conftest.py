import pytest
from board_helpers import board_of, client_of
from browser_helpers import BoardProcess, record_run, wait_for
from index_helpers import new_run, record


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A run of 12 steps, 8 rollouts each, two for each prompt."""
    folder = new_run(tmp_path_factory.mktemp("board") / "run")
    record(folder, range(12), batch=8)
    return folder


@pytest.fixture(scope="session")
def board(folder):
    board = board_of(folder)
    yield board
    board.scanner.stop()


@pytest.fixture(scope="session")
def client(board):
    return client_of(board)


@pytest.fixture(scope="session")
def runs_told(tmp_path_factory):
    """Two runs as real ones leave them; the second earns more."""
    folder = tmp_path_factory.mktemp("told")
    return record_run(folder / "first"), record_run(folder / "second", better=0.5)


@pytest.fixture(scope="session")
def board_told(runs_told):
    """The board of both, in its own process, with what the doctor finds."""
    with BoardProcess(*runs_told) as board:
        wait_for(lambda: all(board.json(f"api/runs/{run}/findings") is not None for run in ("first", "second")))
        yield board
