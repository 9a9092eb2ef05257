"""Start pyarrow without loading pandas."""

import sys
from importlib.abc import MetaPathFinder

import pyarrow as pa


def without_pandas() -> None:
    """Keep pyarrow from loading pandas with the first array, which saves a third of a second.

    For processes that do not need pandas; code that imports pandas itself is not affected.
    """
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    pa.array([])  # pyarrow looks for pandas only once
    sys.meta_path.remove(finder)


class _NoPandas(MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)
