"""A run as the rules see it."""

from cavesson.doctor.derive import BY_NAME
from cavesson.doctor.recorded import RecordedData


class RunData(RecordedData):
    """A run as the rules see it: what is recorded, and what the record determines."""

    derivations = BY_NAME
