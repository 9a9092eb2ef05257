"""Run by torchrun: every process logs its rank."""

import sys
from pathlib import Path

from accelerate import PartialState

from cavesson.integrations.trackers import Trackers

state = PartialState(cpu=True)
with Trackers(("tensorboard", "wandb"), Path(sys.argv[1]), "project", {}) as trackers:
    trackers.log(0, {"rank": float(state.process_index)})
state.wait_for_everyone()
