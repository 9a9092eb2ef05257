"""The documentation as a site: `make docs` builds it from the pages of this repository into build/site."""

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "Cavesson"
copyright = "The authors of Cavesson"
release = metadata.version("cavesson")

# The sources are the whole checkout, so that links from pages to files of the repository work as they do in it.
root_doc = "docs/index"
include_patterns = [
    "docs/**", "benchmarks/*.md", "benchmarks/**/*.md", "CONTRIBUTING.md", "CHANGELOG.md",
    "src/cavesson/board/web/README.md", "examples/notebooks/*.ipynb",
]  # fmt: skip
# The pages of findings are reached from their index by symptom.
suppress_warnings = ["toc.not_included"]
exclude_patterns = ["docs/site/**", "**/results.md", "**/remarks.md", "**/peers.md"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "reference", "agents"]

html_theme = "furo"
html_title = f"Cavesson {release}"
html_extra_path = ["root"]
html_theme_options = {"top_of_page_buttons": []}
html_copy_source = False
html_show_sphinx = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
# Notebooks are kept without outputs. The one that only reads runs when the site is built; those that train, in tests.
nb_execution_mode = "force"
nb_execution_excludepatterns = [
    "examples/notebooks/train_and_look.ipynb",
    "examples/notebooks/an_agent_with_a_tool.ipynb",
]
nb_execution_timeout = 600
nb_execution_raise_on_error = True
# In docstrings, `name` is code, as in the Markdown of the pages.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
