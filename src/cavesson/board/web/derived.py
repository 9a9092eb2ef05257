"""Write src/maths/derived.ts, the derived token columns of cavesson.record.derived: python derived.py."""

from pathlib import Path

from cavesson.record.derived import DERIVED, Derived

TARGET = Path(__file__).parent / "src" / "maths" / "derived.ts"
HEAD = """\
// Written by derived.py from cavesson/record/derived.py.

const { exp, expm1 } = Math;

/** Token columns that follow from recorded ones: what they need, in the order of the arguments of `of`. */
export const DERIVED = {
"""


def module() -> str:
    """Return the TypeScript module."""
    return HEAD + "".join(map(_column, DERIVED.values())) + "} as const;\n"


def _column(column: Derived) -> str:
    needs = ", ".join(f'"{name}"' for name in column.needs)
    arguments = ", ".join(f"{name}: number" for name in column.needs)
    fields = (f"needs: [{needs}]", f'doc: "{column.doc}"', f"of: ({arguments}) => {column.formula}")
    return f"  {column.name}: {{\n" + "".join(f"    {field},\n" for field in fields) + "  },\n"


if __name__ == "__main__":
    TARGET.write_text(module(), encoding="utf-8")
