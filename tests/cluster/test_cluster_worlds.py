"""Environments that a learner sends to reward workers."""

import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cavesson.cluster.worlds import packed, unpacked
from cavesson.errors import UserCodeError
from cavesson.functions import load_function
from cavesson.rollout.environments import NoEnvironment
from cavesson.rollout.rewards.arguments import Judged
from cavesson.rollout.rewards.base import call_rewards

GAME = """
class Game:
    def reset(self, **row):
        self.moves = []

    def move(self, place: int) -> str:
        self.moves.append(place)
        return "moved"
"""
WORKER = """
import pickle, sys
from cavesson.cluster.worlds import load_classes, unpacked
from cavesson.rollout.settings import EnvironmentSettings

load_classes(EnvironmentSettings(use={"game": sys.argv[1]}))
print([one.moves for one in unpacked(pickle.load(sys.stdin.buffer))])
"""


def test_another_process_gets_them_as_they_were_played(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)
    name = f"{tmp_path}/game.py:Game"
    worlds = [load_function(name, "environment")() for _ in range(2)]
    for moves, world in zip(([], [4, 2]), worlds, strict=True):
        world.reset()
        for place in moves:
            world.move(place)
    sent = pickle.dumps(packed(worlds))
    done = subprocess.run([sys.executable, "-c", WORKER, name], input=sent, capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[[], [4, 2]]"
    (without,) = unpacked(packed([NoEnvironment()]))  # of rows that only have tools
    assert isinstance(without, NoEnvironment)


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Thirsty:
    def __setstate__(self, state: object) -> None:
        raise OSError("the server is gone")


@pytest.mark.parametrize(
    ("world", "said"),
    [
        (Locked(), r"Locked cannot be sent to a reward worker \(.*lock"),
        (Thirsty(), r"of this episode cannot be sent to a reward worker \(.*server is gone"),
    ],
)
def test_one_that_cannot_be_sent_is_an_error_of_the_rewards_that_use_it(world: object, said: str) -> None:
    world.state = 1
    judged = Judged(["p"], ["r"], {"environments": unpacked(packed([world]))})
    lengths = {"length": lambda prompts, responses, **_: [len(one) for one in responses]}
    assert call_rewards(lengths, judged)["length"]["length"].values == [1]
    users = {"user": lambda prompts, responses, environments, **_: [one.state for one in environments]}
    with pytest.raises(UserCodeError, match=said) as raised:
        call_rewards(users, judged)
    assert "\n" not in str(raised.value) and "ray.reward_workers.count to 0" in str(raised.value)
