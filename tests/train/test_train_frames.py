"""How many of our functions are between a command and the backward pass."""

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from train_helpers import tiny_flags
from typer.testing import CliRunner

import cavesson
from cavesson.cli import app

OURS = str(Path(cavesson.__file__).parent)
MOST = 6
"""Functions from the command to the one that calls `loss.backward()`, both included."""
ONE_UPDATE = {"update__epochs": 1, "update__mini_batches": 1}


def functions_of_ours(frame: FrameType | None) -> list[str]:
    """The functions of ours that are being called, the outermost first."""
    names: list[str] = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            names.insert(0, frame.f_code.co_qualname)
        frame = frame.f_back
    return names


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ("sft", {}),
        ("ppo", {}),  # several updates
        ("grpo", ONE_UPDATE),  # learns while it scores
        ("rloo", ONE_UPDATE),  # learns from the graph of its scores
    ],
)
def test_few_functions_are_between_the_command_and_the_backward_pass(
    command: str, changes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    backward = torch.Tensor.backward

    def watched(self: torch.Tensor, *args: object, **options: object) -> None:
        seen.append(functions_of_ours(sys._getframe(1)))
        backward(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.Tensor, "backward", watched)
    done = CliRunner().invoke(app, [command, *tiny_flags(command, tmp_path / "run", steps=1, **changes)])
    assert done.exit_code == 0, done.output
    assert seen
    for names in seen:
        names = names[names.index("_add_training.<locals>.command") :]
        assert len(names) <= MOST, names
