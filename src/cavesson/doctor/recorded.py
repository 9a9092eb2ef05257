"""What a run has recorded: settings, metrics, rollouts, and a sample with texts and tokens."""

from collections.abc import Collection, Iterable, Mapping
from copy import copy, deepcopy
from functools import cached_property
from itertools import islice
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.doctor.derivation import Derivation
from cavesson.doctor.names import KINDS, SETTINGS, TRACKED, UNCLEAR, is_of_update, logged_as
from cavesson.doctor.rows import Lookup, Rows, numbers
from cavesson.doctor.sample import Sample, take_sample
from cavesson.doctor.series import Array, Series, series
from cavesson.doctor.turns import Turns
from cavesson.findings.finding import Evidence
from cavesson.findings.fixes import in_run
from cavesson.findings.trainers import TRAINERS, trainer_of
from cavesson.importers.traits import traits_of
from cavesson.record import Run
from cavesson.record.schema import ROW_COLUMNS
from cavesson.record.splits import is_held_out, is_sampled
from cavesson.record.tables import NO_TURNS

CHANCE = 0.01
"""Level of the tests on a whole run."""
HEAVY = frozenset(["prompt", "response", "prompt_ids", "ref_response", "ground_truth", "extra", "reward_parts"])
"""Columns that are read of the sample only."""
NUMBERS = 3
"""Steps with a number after which a metric is expected to have one."""


class RecordedData:
    """The record of a run. Data is read only when a rule first needs it, and only once."""

    derivations: Mapping[str, Derivation] = {}
    """What else the record determines, by name."""
    _part_of: Self | None = None

    def __init__(self, run: Run, sees: Collection[str] = KINDS) -> None:
        """Wrap a run; ``sees`` limits the kinds of data that the rules can read."""
        self.run = run
        self.sees = frozenset(sees)
        self._derived: dict[Derivation, Mapping[str, Any]] = {}
        self._deriving: list[Derivation] = []
        self.used: dict[str, Derivation] = {}
        """What was derived, by name, since this was last cleared."""
        self.chance = CHANCE
        """Level of the tests on this data: the probability with which a test may report what chance explains."""

    def part(self, step: int, chance: float) -> "Self":
        """Return the run from a step on, as if it had begun there, with the level of its tests."""
        found = copy(self)
        found.chance, found._part_of = chance, self.whole
        for name in ("_steps", "_rollouts", "sample", "turns", "said"):
            vars(found).pop(name, None)
        found._steps = self._steps.slice(int(np.searchsorted(self._steps["step"].to_numpy(), step)))
        found._rollouts = (self.rows.since(step), self.evaluation.since(step))
        if len(self.rows):
            found.sample = self.sample.since(step)
            found.turns = self.turns.of(found.sample.rows)
        return found

    @property
    def whole(self) -> Self:
        """The whole run, if this is a part of it."""
        return self if self._part_of is None else self._part_of

    @property
    def info(self) -> dict[str, Any]:
        """The content of run.json, copied so that a rule cannot change it for other rules."""
        return deepcopy(self._info)

    @cached_property
    def _info(self) -> dict[str, Any]:
        return self.run.info if "info" in self.sees else {}

    @property
    def algorithm(self) -> str | None:
        """The name of the algorithm; None if it is not known."""
        name = self._info.get("algorithm")
        return name if isinstance(name, str) else None

    @cached_property
    def traits(self) -> Mapping[str, Any]:
        """What is known of the algorithm, by the fields of `cavesson.traits.Traits`; what is not known is absent."""
        return traits_of(self._info)

    @property
    def own(self) -> bool:
        """Whether Cavesson trained the run, and not only its recorder wrote it, which knows no algorithm.

        Of other trainers, a record shows what they say of themselves.
        """
        return {"cavesson", "algorithm"} <= self._info.keys()

    @property
    def dtype(self) -> str | None:
        """The data type that the policy computes in, such as ``bfloat16``; None if it is not known."""
        found: str | None = self.setting("config.model.dtype") or self.setting("dtype")
        return found

    @property
    def has_no_critic(self) -> bool:
        """Whether all tokens of a response have the same advantage."""
        return not self.recorded("tokens.value") and self.has("rows.advantage")

    def setting(self, path: str, default: Any = None) -> Any:
        """Return an entry of run.json by its dotted path, such as ``config.kl.coef``, recorded or derived.

        ``default`` if it is neither.
        """
        found = self._setting(path)
        if found is None:
            found = self.derive(f"info.{path}")
        return default if found is None else found

    def _setting(self, path: str) -> Any:
        group, _, setting = path.partition(".")
        is_setting = group == "config" and setting != ""  # not the settings as a whole
        found = self._entry(f"config.{in_run(setting, self._info)}" if is_setting else path)
        return self._entry(SETTINGS[path]) if found is None and path in SETTINGS else found

    def _entry(self, path: str) -> Any:
        found: Any = self._info
        for key in path.split("."):
            if not isinstance(found, dict) or key not in found:
                return None
            found = found[key]
        return deepcopy(found)

    def has(self, need: str) -> bool:
        """Return whether a need such as ``rows.NAME`` or ``info.PATH`` is recorded or derived."""
        return self.recorded(need) or self.derive(need) is not None

    def derive(self, name: str) -> Any:
        """Return what the other columns of the record say about a need that it lacks; None if nothing, or in doubt.

        ``used`` names it from then on.
        """
        derivation = self.derivations.get(name)
        if derivation is None or derivation in self._deriving:
            return None
        if self.whole is not self:
            return self.whole.derive(name)
        if derivation not in self._derived:
            self._deriving.append(derivation)
            known = all(any(self.has(one) for one in need.split("|")) for need in derivation.needs)
            self._derived[derivation] = (derivation.function(self) if known else None) or {}
            self._deriving.pop()
        value = self._derived[derivation].get(name)
        if value is not None and not self._deriving:
            self.used[name] = derivation
        return value

    def recorded(self, need: str) -> bool:
        """Return whether a need is recorded."""
        kind, _, name = need.partition(".")
        if kind not in self.sees:
            return False
        if kind == "info":
            return self._setting(name) is not None
        if kind == "steps" and name == "step":
            return bool(self._steps.num_rows)
        if kind == "steps":
            return len(self._logged(name)) > 0
        if kind == "tokens":
            return bool(len(self.rows)) and self.sample.recorded(name)
        if kind == "turns":
            return self.turns.recorded(name)
        if name in HEAVY:
            return bool(len(self.rows)) and self.sample.rows.recorded(name)
        return self.rows.recorded(name)

    @property
    def steps(self) -> Array:
        """[S] the steps with rollouts that were trained on; those with metrics if there are no rollouts."""
        return self.rows.steps if len(self.rows) else np.unique(self._steps["step"].to_numpy())

    @property
    def last_step(self) -> int | None:
        """The last step with rollouts or metrics; None if there is none."""
        logged = self._steps["step"]
        found = [int(self.rows.steps[-1])] if len(self.rows) else []
        return max(found + ([logged[-1].as_py()] if len(logged) else []), default=None)

    @cached_property
    def _steps(self) -> pa.Table:
        return self.run.steps()

    @cached_property
    def metrics(self) -> list[str]:
        """The names of the logged metrics."""
        return [name for name in self._steps.column_names if name not in ("step", "attempt", "rank")]

    def metric(self, name: str) -> Series:
        """Return a metric by step: as logged, under any trainer's name, or derived; empty if it is neither."""
        logged = self._logged(name)
        derived: Series | None = None if len(logged) else self.derive(f"steps.{name}")
        return logged if derived is None else derived

    def _logged(self, name: str) -> Series:
        called = self.logged_name(name)
        if called is None:
            return series(np.zeros(0), np.zeros(0))
        return series(self._steps["step"].to_numpy(), numbers(self._steps[called]))

    def logged_name(self, name: str) -> str | None:
        """Return the name under which a metric is logged; None if it is not."""
        return next((called for called in logged_as(name) if called in self._steps.column_names), None)

    def is_unclear(self, name: str) -> bool:
        """Return whether a metric is logged under a name that says what it is only if the trainer is known."""
        called = self.logged_name(name) or ""
        return called.removeprefix(TRACKED) in UNCLEAR and trainer_of(self._info) not in TRAINERS

    @cached_property
    def only_held_out(self) -> bool:
        """Whether another trainer's record has held-out rollouts only: these are judged, as far as they can be."""
        split = self._table["split"]
        return not self.own and len(split) > 0 and bool(pc.all(is_held_out(split)).as_py())

    @cached_property
    def _table(self) -> pa.Table:
        """All rollouts, without texts."""
        return self.run.rows([column.name for column in ROW_COLUMNS if column.name not in HEAVY])

    @cached_property
    def _rollouts(self) -> tuple[Rows, Rows]:
        """The rollouts to judge, which are those that were sampled to train on if there are any, and the held-out ones.

        Responses that the data give are in neither: they say nothing of the policy.
        """
        table = self._table if "rows" in self.sees else self._table.slice(0, 0)
        derived = self._columns("rows")
        if self.only_held_out:
            return Rows(table, derived=derived), Rows(table.slice(0, 0), derived=derived)
        split = table["split"]
        return Rows(table, is_sampled(split), derived), Rows(table, is_held_out(split), derived)

    def _columns(self, kind: str) -> Lookup:
        return lambda name: self.derive(f"{kind}.{name}")

    @property
    def rows(self) -> Rows:
        """The rollouts that were trained on, without texts; the held-out ones if the record has no others."""
        return self._rollouts[0]

    @property
    def evaluation(self) -> Rows:
        """The held-out rollouts beside ``rows``, without texts."""
        return self._rollouts[1]

    @cached_property
    def sample(self) -> Sample:
        """A sample of ``rows``, with texts and tokens."""
        ahead = bool(self._setting("config.sampling.max_staleness"))
        return take_sample(self.run, self.rows, self._columns("tokens"), ahead)

    @cached_property
    def turns(self) -> Turns:
        """The turns of the episodes in ``sample``; none if the run has none, or may not be seen."""
        if "turns" not in self.sees or not len(self.rows) or not self.run.has_turns():
            return Turns(NO_TURNS, Rows(self._table.slice(0, 0)))
        rows = self.sample.rows
        return Turns(self.run.turns_of(zip(rows.step.tolist(), rows.sample.tolist(), strict=True)), rows)

    @cached_property
    def said(self) -> Rows:
        """The rollouts in ``sample``, with what the policy said in them as their responses.

        Of an episode, that is the text of the policy's turns. A call is an action and has the form that its tool asks
        for, and the policy has not written what comes between its turns.
        """
        rows = self.sample.rows
        if not self.turns.recorded("text"):
            return rows
        both = zip(rows.texts("response"), self.turns.spoken, strict=True)
        return rows.with_texts("response", ["\n".join(filter(None, said)) if said else text for text, said in both])

    def step_evidence(self, steps: Iterable[int | None]) -> tuple[Evidence, ...]:
        """Return a typical rollout of each of the first three given steps as evidence, ignoring None.

        Of a step without rollouts, it is one of the next step that has some.
        """
        all_steps, given = self.rows.step, [step for step in islice(steps, 3) if step is not None]
        there = [all_steps[at] for at in np.searchsorted(all_steps, given) if at < len(all_steps)]
        some = (np.arange(*np.searchsorted(all_steps, [step, step + 1])) for step in there)
        return self.rows.evidence(map(self.rows.typical, some))

    def not_finite_metrics(self) -> list[tuple[int, str, int]]:
        """Return the first step, name and count of each metric that has NaN or infinite values.

        A metric that is not of the update can be NaN where it does not apply, such as a score that is measured at every
        25th step: it counts only if it was a number at all steps before, and not at any step from then on.
        """
        found = []
        for name in self.metrics:
            logged = np.flatnonzero(self._steps[name].is_valid().to_numpy())
            bad = logged[~np.isfinite(numbers(self._steps[name])[logged])]
            breaks = len(bad) and np.array_equal(bad, logged[-len(bad) :]) and len(logged) - len(bad) >= NUMBERS
            if len(bad) and (breaks or is_of_update(name)):
                found.append((int(self._steps["step"][int(bad[0])].as_py()), name, len(bad)))
        return found

    def not_finite_columns(self) -> list[tuple[int, str, int]]:
        """Return the first step, name and count of each column of rollouts and tokens with NaN or infinite values.

        A part of the reward is NaN where it does not apply; if this is a mistake, the reward is NaN too.
        """
        if "rows" not in self.sees:
            return []
        lines = self.run.not_finite()
        lines = lines.filter(pc.invert(is_held_out(lines["split"])))
        lines = lines.filter(pc.invert(pc.starts_with(lines["column"], "part/")))
        if not lines.num_rows:
            return []
        found = lines.group_by("column").aggregate([("step", "min"), ("not_finite", "sum")])
        return [(line["step_min"], line["column"], line["not_finite_sum"]) for line in found.to_pylist()]
