"""Quoting of texts for SQL and CSV."""


def quoted(text: str) -> str:
    """Put a text in double quotes and double the quotes inside it, as for names in SQL and cells of CSV."""
    return '"' + text.replace('"', '""') + '"'
