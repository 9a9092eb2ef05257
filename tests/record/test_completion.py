"""What the tab key offers in IPython and Jupyter: the names of the package, of runs, tables, rollouts and settings."""

from collections.abc import Callable
from pathlib import Path

import pytest

import cavesson
from cavesson.importers import import_run

pytest.importorskip("IPython", reason="in the extra `dev`")

from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

FAILED = Path(__file__).parents[2] / "examples" / "notebooks" / "failed_run"


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], set[str]]:
    """What is offered after a text that was typed, in a session that has opened a run."""
    folder = tmp_path_factory.mktemp("ipython")
    import_run(FAILED / "completions", folder / "run", metrics=FAILED / "trainer_state.json")
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell(config=config, ipython_dir=str(folder))
    shell.push({"cavesson": cavesson, "folder": folder / "run"})
    for line in ("run = cavesson.open(folder)", "settings = cavesson.PPORun()", "findings = run.findings()"):
        shell.run_cell(line).raise_error()

    def complete(typed: str) -> set[str]:
        with provisionalcompleter():
            return {one.text for one in shell.Completer.completions(typed, len(typed))}

    return complete


def test_the_package_offers_its_public_names(offered: Callable[[str], set[str]]) -> None:
    assert offered("cavesson.") >= set(cavesson.__all__) - {"__version__"}
    assert offered("cavesson.PPOR") == {"PPORun"}


def test_a_run_offers_what_can_be_read_and_asked(offered: Callable[[str], set[str]]) -> None:
    methods = {"rows", "steps", "tokens", "rollout", "sql", "pandas", "findings", "plot", "compare"}
    assert offered("run.") >= methods
    assert offered("cavesson.open(folder).") >= methods
    assert offered("run.info['for") == {"format"}


def test_what_a_run_returns_offers_its_own(offered: Callable[[str], set[str]]) -> None:
    assert offered("run.rows().") >= {"column_names", "to_pandas", "to_pylist"}
    assert offered("run.rollout(1, 2).") >= {"row", "tokens", "turns", "texts"}
    assert offered("run.findings().") >= {"summary", "index"}
    assert offered("findings[0].") >= {"rule", "cause", "fix", "evidence"}


def test_settings_offer_their_groups_and_arguments(offered: Callable[[str], set[str]]) -> None:
    assert offered("settings.") >= set(cavesson.PPORun.model_fields)
    assert offered("settings.kl.") >= set(cavesson.KLSettings.model_fields)
    assert offered("cavesson.PPORun(st") == {"steps="}
    assert offered("cavesson.KLSettings(") >= {f"{name}=" for name in cavesson.KLSettings.model_fields}
