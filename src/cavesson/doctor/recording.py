"""The lines of code that record what a run lacks, for each trainer; docs/integrations.md shows them in a table."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cavesson.doctor.derive import BY_NAME
from cavesson.findings.trainers import TRAINERS, trainer_of
from cavesson.findings.words import Phrase
from cavesson.record.schema import ROW_COLUMNS, TOKEN_COLUMNS, TURN_COLUMNS
from cavesson.record.write.statistics import NEEDS

DOCS = "docs/integrations.md#what-records-which-column"
OWN_LOOP = Phrase("your own loop")
ALWAYS = ("info.", "steps.step", "tokens.learned")
"""Needs for which a loop adds no column: settings; the step, which every call names; and which tokens are trained on,
which are all where they come as lists."""


def _columns(rows: str = "", tokens: str = "", turns: str = "") -> frozenset[str]:
    """Return the columns of these names, with the statistics that the recorder computes from those of the tokens."""
    given = tokens.split()
    computed = [name for name, needs in NEEDS.items() if set(needs) <= set(given)]
    of_rows = [*rows.split(), *computed, *(["length"] if given else [])]
    of_turns = [f"turns.{name}" for name in turns.split()]
    return frozenset([f"rows.{name}" for name in of_rows] + [f"tokens.{name}" for name in given] + of_turns)


COLUMNS = {
    "rows": {one.name for one in ROW_COLUMNS},
    "tokens": {one.name for one in TOKEN_COLUMNS},
    "turns": {one.name for one in TURN_COLUMNS},
}


@dataclass(frozen=True)
class Way:
    """Lines of code that record the runs of a trainer."""

    name: str
    """What run.json calls it, as in ``TRAINERS``."""
    code: str
    records: frozenset[str]
    """``rows.NAME``, ``tokens.NAME`` and ``turns.NAME``, as in the needs of a rule."""
    requires: Mapping[str, str] = field(default_factory=dict)
    """Columns that the trainer has only under a condition → the condition."""

    @property
    def trainer(self) -> str:
        """The name of the trainer."""
        return TRAINERS[self.name]

    def commented(self, columns: Iterable[str]) -> str:
        """Return the lines, and the conditions of some of their columns as comments."""
        conditions = dict.fromkeys(line for column in columns for line in self.conditions(column))
        return "\n".join([self.code, *conditions])

    def conditions(self, column: str) -> list[str]:
        """Return the conditions of a column, or of those that it is computed from, as comments."""
        return [f"# {one}: {self.requires[one]}" for one in (column, *_inputs(column)) if one in self.requires]


_TURNS, _EPISODES = "role name arguments text first_token tokens error", "GRPO with tools or an environment"

WAYS = (
    Way(
        "trl",
        'from cavesson.integrations.trl import record\nrecord(trainer, "runs/mine")  # before trainer.train()',
        _columns(
            "split group prompt_ids reward reward_parts finish_reason policy_version kl_coef",
            "token_id learned source logprob ref_logprob sampler_logprob entropy value token_reward advantage return",
            _TURNS,
        ),
        {
            "rows.split": "eval_strategy other than no",
            "rows.reward_parts": "GRPO and RLOO",
            "tokens.ref_logprob": "beta > 0, or PPO",
            "tokens.sampler_logprob": "use_vllm=True in GRPO",
            "tokens.entropy": "GRPO and RLOO",
            "tokens.source": _EPISODES,
            "tokens.value": "PPO",
            "tokens.token_reward": "PPO",
            "tokens.return": "PPO",
            **dict.fromkeys((f"turns.{name}" for name in _TURNS.split()), _EPISODES),
        },
    ),
    Way(
        "verl",
        "from cavesson.integrations.verl import record\n"
        'record(trainer, "runs/mine")  # in main_ppo.py, before trainer.fit()',
        _columns(
            "group prompt_ids reward",
            "token_id learned source logprob ref_logprob sampler_logprob value token_reward advantage return",
        ),
        {
            "tokens.ref_logprob": "algorithm.use_kl_in_reward=True or actor_rollout_ref.actor.use_kl_loss=True",
            "tokens.sampler_logprob": "actor_rollout_ref.rollout.calculate_log_probs=True",
            "tokens.value": "algorithm.adv_estimator=gae",
        },
    ),
    Way(
        "openrlhf",
        "from cavesson.integrations.openrlhf import record\n"
        'record("runs/mine", global_step, experiences, self.tokenizer, self.args)  '
        "# in ppo_trainer.py, after make_experience_batch",
        _columns(
            "group prompt_ids reward finish_reason",
            "token_id learned source logprob ref_logprob sampler_logprob value advantage return",
        ),
        {
            "tokens.ref_logprob": "--algo.kl.init_coef above 0",
            "tokens.sampler_logprob": "--algo.advantage.is_correction_level other than off",
            "tokens.value": "--algo.advantage.estimator gae",
        },
    ),
    Way(
        "nemo-rl",
        "cavesson import logs/exp_001 runs/mine  # train_data_step*.jsonl, which NeMo RL writes by default",
        _columns("split group prompt_ids reward", "token_id learned logprob sampler_logprob advantage"),
        {"rows.split": "grpo.val_period above 0"},
    ),
    Way(
        "nemo-rl",
        'log_data["reference_policy_logprobs"] = train_data["reference_policy_logprobs"].tolist()  '
        "# in grpo.py, before log_batched_dict_as_jsonl; then cavesson import",
        _columns(tokens="logprob ref_logprob") - {"tokens.logprob", "rows.length"},
        {"tokens.ref_logprob": "grpo.skip_reference_policy_logprobs_calculation=false (otherwise they are all 0)"},
    ),
    Way(
        "prime-rl",
        "cavesson import RUN_DIR runs/mine  # the traces of the file monitor, which prime-rl writes by default",
        _columns(
            "split group prompt_ids reward reward_parts finish_reason",
            "token_id learned logprob ref_logprob sampler_logprob entropy advantage",
        ),
        {
            "tokens.logprob": "prime-rl since September 2026",
            "tokens.entropy": "prime-rl since September 2026",
            "tokens.ref_logprob": "algorithms with a reference, such as opd",
        },
    ),
)
"""A trainer has several if one line does not record everything."""


def needs(several: Iterable[str]) -> str:
    """Return needs as a reader sees them; those that another one meets are left out."""
    each = [need.split("|") for need in dict.fromkeys(several)]
    alone = {need[0] for need in each if len(need) == 1}
    return ", ".join(" or ".join(need) for need in each if len(need) == 1 or not alone.intersection(need))


class Recipe(NamedTuple):
    """What to add to a trainer, and which of the missing columns that records."""

    trainer: str
    columns: tuple[str, ...]
    code: str


def recipes(info: Mapping[str, Any], lacking: Iterable[str]) -> list[Recipe]:
    """Return the lines that record missing columns, for the trainer of the run; for an own loop if it is not known.

    Args:
        info: The content of run.json.
        lacking: Needs as in a rule; of alternatives joined by ``|`` one is recorded.
    """
    needs = [need.split("|") for need in dict.fromkeys(lacking)]
    if "cavesson" in info and "algorithm" in info:
        return []  # Cavesson's own trainer records everything that it computes
    found = [_recipe(way, needs, "format" in info) for way in WAYS if way.name == trainer_of(info)]
    return [recipe for recipe in found if recipe.columns] or own_loop(needs)


def fewest_recipes(info: Mapping[str, Any], several: Sequence[Sequence[str]]) -> tuple[list[Recipe], int]:
    """Return the lines that decide most failures with few additions to a trainer.

    Failures are added in the order of what each needs in addition, until more than half are decided.

    Args:
        info: The content of run.json.
        several: What each failure lacks, as needs of a rule; empty if columns do not decide it.

    Returns:
        The lines, and the number of failures that they decide.
    """
    found = {i: recipes(info, lacking) for i, lacking in enumerate(several)}
    decisive = [i for i, lacking in enumerate(several) if lacking and _decide(found[i], lacking)]
    by_hook = [i for i in decisive if found[i][0].trainer != OWN_LOOP]
    additions = {i: set().union(*map(_additions, found[i])) for i in by_hook or decisive}
    chosen: set[str] = set()
    while 2 * (decided := sum(one <= chosen for one in additions.values())) <= len(several) and decided < len(
        additions
    ):
        chosen |= min((one for one in additions.values() if not one <= chosen), key=lambda one: len(one - chosen))
    return recipes(info, [need for i, one in additions.items() if one <= chosen for need in several[i]]), decided


def _decide(found: Sequence[Recipe], lacking: Sequence[str]) -> bool:
    """Return whether the columns that these lines record are all that a failure lacks."""
    given = {column for one in found for column in one.columns}.union(ALWAYS)
    each = [[inputs for name in need.split("|") for inputs in ([name], _inputs(name)) if inputs] for need in lacking]
    return all(any(given.issuperset(inputs) for inputs in alternatives) for alternatives in each)


def _additions(recipe: Recipe) -> set[str]:
    """Return the columns that need more than the call of a hook: a setting of the trainer, or code of a loop."""
    if recipe.trainer == OWN_LOOP:
        return set(recipe.columns)
    ways = [way for way in WAYS if way.trainer == recipe.trainer]
    return {column for column in recipe.columns if any(way.conditions(column) for way in ways)}


def _recipe(way: Way, needs: Sequence[Sequence[str]], imported: bool) -> Recipe:
    # What an import finds without a condition, that of this run would have found.
    again = imported and way.code.startswith("cavesson import")
    found = frozenset(one for one in way.records if way.conditions(one)) if again else way.records
    known = (next((column for column in need if column in found), None) for need in needs)
    columns = tuple(dict.fromkeys(column for column in known if column is not None))
    return Recipe(way.trainer, columns, way.commented(columns))


def recordable(need: str, recorded: Callable[[str], bool]) -> str:
    """Return the alternatives of a need that a trainer can record, as in a rule; empty if there are none.

    Args:
        need: As in a rule, with ``|`` between alternatives. Some of them are only derived from others.
        recorded: Whether a column is recorded already.
    """
    each = (name for one in need.split("|") for name in ([one] if _is_column(one) else _inputs(one)))
    return "|".join(dict.fromkeys(name for name in each if not recorded(name)))


def _is_column(name: str) -> bool:
    kind, _, column = name.partition(".")
    if kind in COLUMNS:
        return column in COLUMNS[kind]
    return kind == "info" or name not in BY_NAME


def own_loop(needs: Iterable[Sequence[str]]) -> list[Recipe]:
    """Return the calls of ``Recorder`` that record the first alternative of each need; nothing for settings alone."""
    first = (next((column for column in need if not column.startswith(ALWAYS)), "") for need in needs)
    columns = tuple(dict.fromkeys(one for column in first for one in _inputs(column) or [column] if one))
    given = {
        kind: [one for one in columns if one.startswith(f"{kind}.")] for kind in ("rows", "tokens", "turns", "steps")
    }
    lines = ["import cavesson", 'recorder = cavesson.Recorder("runs/own")']
    if given["rows"] or given["tokens"] or given["turns"]:
        always = ["rows.prompt", "rows.response", "rows.reward"]
        rows = _dictionary([*always, *(one for one in given["rows"] if one not in always)])
        turns = (
            f", turns={_dictionary(dict.fromkeys(['turns.sample', 'turns.role', *given['turns']]))}"
            if given["turns"]
            else ""
        )
        lines.append(f"recorder.rollouts(step, {rows}, {_dictionary(given['tokens'])}{turns})")
    if given["steps"]:
        lines.append(f"recorder.metrics(step, {_dictionary(given['steps'])})")
    return [Recipe(OWN_LOOP, columns, "\n".join(lines))] if columns else []


def _inputs(column: str) -> list[str]:
    """Return the token columns from which recorder or doctor compute a column of a rollout; none if it is recorded."""
    kind, _, name = column.partition(".")
    computed = {**NEEDS, "length": ("token_id",), "advantage": ("advantage",), "penalised_advantage": ("advantage",)}
    return [f"tokens.{one}" for one in computed.get(name, ())] if kind == "rows" else []


def _dictionary(columns: Iterable[str]) -> str:
    """Return a dictionary of variables as code: ``{"reward": rewards}``."""
    entries = []
    for column in columns:
        kind, _, name = column.partition(".")
        variable = name.rpartition("/")[2]
        plural = f"{variable[:-1]}ies" if variable.endswith("y") else f"{variable.removesuffix('s')}s"
        entries.append(f'"{name}": {variable if kind == "steps" else plural}')
    return f"{{{', '.join(entries)}}}"
