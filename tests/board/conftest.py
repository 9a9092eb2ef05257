import pytest
from board_helpers import board_of, client_of
from index_helpers import new_run, record


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A run of 12 steps, 8 rollouts each, two for each prompt."""
    folder = new_run(tmp_path_factory.mktemp("board") / "a run")
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
