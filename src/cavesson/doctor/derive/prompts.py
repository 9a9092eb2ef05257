"""Groups of the rollouts that are judged, from the texts of the prompts; others have none (NaN)."""

import numpy as np

from cavesson.doctor.derivation import DerivedValues, derivation
from cavesson.doctor.recorded import RecordedData
from cavesson.doctor.rows import Rows
from cavesson.doctor.series import Array
from cavesson.record.keys import rollout_keys
from cavesson.record.splits import HELD_OUT, of_split


@derivation(gives=["rows.group"], needs=["rows.prompt"], how="equal prompts")
def equal_prompts(data: RecordedData) -> DerivedValues:
    judged = HELD_OUT if data.only_held_out else "train"
    table = of_split(data.run.rows(["step", "sample", "split", "prompt"]), judged)
    prompts = table["prompt"].combine_chunks().dictionary_encode()
    if len(prompts.dictionary) < 2:
        return None  # no prompts are known, as in a log of texts that begin with them
    numbers = prompts.indices.to_numpy(zero_copy_only=False).astype(np.float64)
    keys = rollout_keys(table)

    def group(rows: Rows) -> Array:
        place = np.searchsorted(keys, rows.keys).clip(max=len(keys) - 1)
        return np.where(keys[place] == rows.keys, numbers[place], np.nan)

    return {"rows.group": group}
