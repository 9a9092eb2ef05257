"""Groups of rollouts, from the texts of the prompts."""

from typing import TYPE_CHECKING

import numpy as np

from cavesson.doctor.derive.derivation import Found, derivation
from cavesson.doctor.rows import Rows
from cavesson.doctor.series import Array
from cavesson.record.keys import rollout_keys

if TYPE_CHECKING:
    from cavesson.doctor.data import RunData


@derivation(gives=["rows.group"], needs=["rows.prompt"], how="equal prompts")
def equal_prompts(data: "RunData") -> Found:
    table = data.run.rows(["step", "sample", "prompt"])
    prompts = table["prompt"].combine_chunks().dictionary_encode()
    if len(prompts.dictionary) < 2:
        return None  # no prompts are known, as in a log of texts that begin with them
    numbers = prompts.indices.to_numpy(zero_copy_only=False).astype(np.float64)
    keys = rollout_keys(table)

    def group(rows: Rows) -> Array:
        return np.asarray(numbers[np.searchsorted(keys, (rows.step << 32) + rows.sample)])

    return {"rows.group": group}
