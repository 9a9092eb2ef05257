"""Record TRL's trainers: GRPO and RLOO (tested with TRL 1.10 and 1.16), and PPO (1.10, the last version with PPO).

```python
from cavesson.integrations.trl import record

trainer = GRPOTrainer(...)
record(trainer, "runs/mine")      # every token, reward part and metric from here on
trainer.train()
```

For other trainers that call reward functions, the callback alone records what passes through these functions:

```python
callback = RecorderCallback("runs/mine")
trainer = SomeTrainer(reward_funcs=callback.rewards([right, short]), callbacks=[callback])
```
"""

from pathlib import Path
from typing import Any

from cavesson.errors import UserError
from cavesson.integrations import trl_grouped, trl_ppo
from cavesson.integrations.trl_callback import RecorderCallback

__all__ = ["RecorderCallback", "record"]


def record(trainer: Any, folder: Path | str) -> RecorderCallback:
    """Record a trainer's run; call this once, before ``train``.

    Args:
        trainer: TRL's ``GRPOTrainer``, ``RLOOTrainer`` or ``PPOTrainer``, or a subclass.
        folder: Run folder; if it already exists, a new attempt is added to it, as for a resumed run.

    Raises:
        UserError: The trainer is of another type.
    """
    callback = RecorderCallback(folder)
    if hasattr(trainer, "_generate_and_score_completions"):
        watch = trl_grouped.watch
    elif hasattr(trainer, "value_model"):
        watch = trl_ppo.watch
    else:
        raise UserError(
            f"{type(trainer).__name__} is not a GRPOTrainer, RLOOTrainer or PPOTrainer; for others that call "
            "reward functions: callback = RecorderCallback(folder), reward_funcs=callback.rewards([…]), "
            "callbacks=[callback]"
        )
    watch(trainer, callback)
    trainer.add_callback(callback)
    return callback
