"""The location of the built page."""

from pathlib import Path

STATIC = Path(__file__).with_name("static")
NO_PAGE = "the page is not built; build it with: pip install --editable . (or npm run build in src/cavesson/board/web)"
