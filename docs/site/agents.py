"""`llms.txt`, the list of all pages for language models (https://llmstxt.org), beside the site's first page."""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True}


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.format != "html":
        return
    lines = [
        "# Cavesson",
        "",
        "> Train language models with human feedback, with every token on record.",
        "",
        "## Pages",
        "",
    ]
    for name in sorted(app.env.found_docs):
        page = app.env.get_doctree(name)
        first = next(iter(page.findall(nodes.paragraph)), None)
        about = f": {' '.join(first.astext().split())}" if first is not None else ""
        lines.append(f"- [{app.env.titles[name].astext()}]({app.builder.get_target_uri(name)}){about}")
    Path(app.outdir, "llms.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
