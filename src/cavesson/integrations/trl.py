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

import dataclasses
import inspect
from pathlib import Path
from typing import Any

from cavesson.errors import UserError
from cavesson.integrations import trl_grouped, trl_ppo
from cavesson.integrations.trl_callback import RecorderCallback
from cavesson.integrations.trl_recipe.given import TRAINERS, Given
from cavesson.integrations.trl_recipe.recipe import recipe as trl_recipe

__all__ = ["RecorderCallback", "recipe", "record"]


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


def recipe(trainer: Any) -> str:
    """Return a recipe of Cavesson, as TOML, that trains as a trainer of TRL does; see ``cavesson from-trl``.

    Args:
        trainer: TRL's ``SFTTrainer``, ``RewardTrainer``, ``DPOTrainer``, ``CPOTrainer``, ``ORPOTrainer``,
            ``KTOTrainer``, ``GRPOTrainer``, ``RLOOTrainer`` or ``GKDTrainer``, or a subclass.

    Raises:
        UserError: The trainer is of another type.
    """
    names = {f"{one.name}Trainer": key for key, one in TRAINERS.items()}
    key = next((names[kind.__name__] for kind in type(trainer).__mro__ if kind.__name__ in names), None)
    if key is None:
        raise UserError(f"{type(trainer).__name__} is not a trainer of TRL with a counterpart: {', '.join(names)}")
    defaults = {one.name: one.default for one in dataclasses.fields(trainer.args)}
    values = {name: getattr(value, "value", value) for name, value in vars(trainer.args).items() if name in defaults}
    given = Given(key, {name: value for name, value in values.items() if value != defaults[name]})
    adapters = getattr(trainer.model, "peft_config", {})
    config = next(iter(adapters.values()), None)
    if config is not None:
        given.values["lora"] = {
            "r": config.r, "alpha": config.lora_alpha, "target_modules": config.target_modules,
            "use_dora": config.use_dora,
        }  # fmt: skip
    given.values["model"] = trainer.model.config.name_or_path
    for function in getattr(trainer, "reward_funcs", []):
        path = getattr(getattr(function, "config", None), "name_or_path", None)
        given.rewards.append(path or _named(function))
    rows = trainer.train_dataset
    return trl_recipe(given, trainer.args.world_size, len(rows) if hasattr(rows, "__len__") else None)


def _named(function: Any) -> str:
    """Return a reward function as file.py:name."""
    name = getattr(function, "__name__", type(function).__name__)
    return f"{inspect.getsourcefile(inspect.unwrap(function)) if inspect.isfunction(function) else 'FILE.py'}:{name}"
