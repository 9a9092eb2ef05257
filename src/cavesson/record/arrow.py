"""Starting pyarrow without pandas."""

import sys
from importlib.abc import MetaPathFinder

import pyarrow as pa


def without_pandas() -> None:
    """Lets pyarrow find no pandas, which it would load with the first array: a third of a second.

    For a process in which nothing needs it; what imports pandas itself still gets it.
    """
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    pa.array([])  # it looks for pandas once
    sys.meta_path.remove(finder)


class _NoPandas(MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)
