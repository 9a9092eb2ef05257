"""What pyarrow imports late: pandas never where nothing needs it, and nothing in threads."""

import subprocess
import sys


def modules_after(first: str) -> list[str]:
    code = f"import sys; {first}; import pyarrow as pa; pa.array([1]); print('pandas' in sys.modules)"
    code += "; import pandas; print(pandas.Series([1]).sum())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_pandas_is_loaded_by_who_imports_it_only():
    without = "from cavesson.process_limits import without_pandas; without_pandas()"
    assert modules_after("pass") == ["True", "1"]  # else there is nothing to spare
    assert modules_after(without) == ["False", "1"]


def test_the_first_conversion_of_an_array_finds_numpy_ma_loaded():
    code = "import sys, numpy, pyarrow{}\nbefore = 'numpy.ma' in sys.modules; pyarrow.array(numpy.arange(3))\n"
    code += "print(before, 'numpy.ma' in sys.modules)"
    late = [
        subprocess.run([sys.executable, "-c", code.format(more)], capture_output=True, text=True, check=True).stdout
        for more in ("", ", cavesson.record.schema")
    ]
    assert late == ["False True\n", "True True\n"]  # the first: else there is nothing to load early
