"""Which weights sampled a response, where the record says it of its tokens alone."""

from typing import TYPE_CHECKING

import numpy as np

from cavesson.doctor.derive.derivation import Found, derivation, of_sample

if TYPE_CHECKING:
    from cavesson.doctor.data import RunData


@derivation(
    gives=["rows.policy_version"],
    needs=["tokens.sampler_version"],
    how="the weights that sampled the first token of the response",
)
def policy_versions(data: "RunData") -> Found:
    sample = data.sample
    first = sample.position == 0
    version = np.full(len(sample.rows), np.nan)
    version[sample.line[first]] = sample["sampler_version"][first]
    return {"rows.policy_version": of_sample(sample.rows, version)}
