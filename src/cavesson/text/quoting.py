"""Texts in quotes, for what reads them again."""


def quoted(text: str) -> str:
    """Put a text in double quotes, and double those inside it: so are names in SQL and cells of CSV written."""
    return '"' + text.replace('"', '""') + '"'
