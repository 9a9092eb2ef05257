"""Which URLs can be the place of a record: those of object stores, and no others.

The library that reads them, fsspec, knows many more kinds of URLs. Some of them read local files, send requests to any
host, or evaluate templates; a chain of several, with "::" between them, does all of that at once.
"""

import re

from cavesson.errors import UserError

SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
"""Of Amazon S3 and stores compatible with it, Google Cloud Storage, and Azure Blob Storage."""
_PLACE = re.compile(rf"(?:{'|'.join(SCHEMES)})://(?P<host>[^/\s?#]+)(?:/[^\s?#]*)?")


def checked_url(url: str) -> str:
    """Return the URL of a place in object storage, without the slash at its end.

    Raises:
        UserError: it is another kind of URL, a chain of several, or has a password or a query.
    """
    found = _PLACE.fullmatch(url)
    if found is None or "::" in url:
        raise UserError(
            f"{url!r} is not a place in object storage, such as s3://bucket/run; "
            f"its URL begins with one of {', '.join(f'{name}://' for name in SCHEMES)}"
        )
    if ":" in found["host"]:
        raise UserError(f"{url!r} has a password or a port: set credentials and endpoints in the environment instead")
    return url.rstrip("/")
