"""The built page: where it is, and its views."""

from pathlib import Path

STATIC = Path(__file__).with_name("static")
VIEWS = ("runs", "overview", "step", "responses", "prompt", "tokens", "patterns", "compare", "sql", "settings")
NO_PAGE = "the page is not built; build it with: pip install --editable . (or npm run build in src/cavesson/board/web)"
