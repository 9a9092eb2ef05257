"""The sdist and the wheel contain what they need, and nothing that the machine has built or installed."""

import subprocess
import tarfile
from pathlib import Path, PurePosixPath
from shutil import copy

import pytest

pytest.importorskip("hatchling", reason="in the extra `dev`")

from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
WEB = "src/cavesson/board/web"
MADE = (
    f"{WEB}/node_modules/@esbuild/linux-x64/bin/esbuild", "src/cavesson/board/static/index.html",
    "src/cavesson/board/static/diagnosis.json",
    "src/cavesson/__pycache__/cli.cpython-311.pyc", ".import_linter_cache/grimp.json", ".venv/bin/python",
)  # fmt: skip
"""Files that git ignores: of packages, of the built page, of caches and of an environment."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, with files that were made there."""
    folder = tmp_path_factory.mktemp("project")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in [*filter(None, listed.split("\0")), *MADE]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name in MADE:
            (folder / name).write_text("made here")
        elif (ROOT / name).exists():
            copy(ROOT / name, folder / name)
    return folder


@pytest.mark.slow
def test_the_sdist_has_the_sources_and_nothing_that_was_made_of_them(project: Path, tmp_path: Path) -> None:
    """It is built without npm: the page is built when a wheel is made of it, for which it has everything."""
    builder = SdistBuilder(str(project))
    assert "custom" not in builder.config.hook_config
    (file,) = builder.build(directory=str(tmp_path))
    with tarfile.open(file) as archive:
        names = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in archive.getnames()}
    assert not names & set(MADE)
    sources = {"hatch_build.py", "LICENSE", "README.md", "src/cavesson/__init__.py", "recipes/tiny-grpo.toml"}
    sources |= {"docs/diagnosis/truncated.md"}  # which the page of the board contains
    assert names >= sources | {f"{WEB}/{name}" for name in ("build.mjs", "package.json", "package-lock.json", ".npmrc")}
    assert Path(file).stat().st_size < 10e6


def test_the_wheel_has_the_page_and_all_other_data(project: Path) -> None:
    builder = WheelBuilder(str(project))
    names = {file.distribution_path for file in builder.recurse_included_files()}
    assert names >= {
        "cavesson/board/static/index.html", "cavesson/board/static/diagnosis.json", "cavesson/demo/demo.toml",
        "cavesson/tools/templates/comparison.html",
        "cavesson/tools/templates/comparison.js", "cavesson/doctor/languages/vi.toml", "cavesson/py.typed",
    }  # fmt: skip
    assert not [name for name in names if "/web/" in name or "__pycache__" in name]
    assert "custom" in builder.config.hook_config  # builds the page; an editable install is a wheel as well


def test_the_wheel_has_every_file_of_the_package_that_git_knows(project: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z", "src"], cwd=ROOT, capture_output=True, text=True, check=True)
    known = {name.removeprefix("src/") for name in listed.stdout.split("\0") if name and WEB not in name}
    assert known <= {file.distribution_path for file in WheelBuilder(str(project)).recurse_included_files()}
