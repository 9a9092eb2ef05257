"""Asks rldoctor and rlprobe: PYTHON ask_peers.py FILE..., in an environment that has them and nothing of this library.

A file holds one run as `peers` writes it; a line of JSON per file is printed: what each of the two says, the gravest
first, as pairs of name and severity, and the checks that rldoctor says it skipped.
"""

import json
import sys
import tempfile
from typing import Any

import rl_doctor
from rlprobe import Recorder
from rlprobe.doctor import diagnose


def ask_rldoctor(config: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    """Hands the scalars over as records, as its documentation has it for a loop of one's own."""
    found = rl_doctor.diagnose(rl_doctor.run_from_records(records, config=config))
    said = [(one.detector, one.severity.name.lower()) for one in found.problems]
    return {"said": said, "skipped": [one.detector for one in found.skipped]}


def ask_rlprobe(config: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    """Record the run with its recorder, and lets its doctor look at the recording."""
    with tempfile.TemporaryDirectory() as folder:
        how = {"algorithm": config["algorithm"], "trainer_config": config}
        with Recorder(folder, capture_env=False, install_handlers=False, **how) as recorder:
            for record in records:
                recorder.log_step(**record)
        return {"said": [(one.signature_id, one.severity) for one in diagnose(folder)], "skipped": []}


if __name__ == "__main__":
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            log = json.load(file)
        said = {
            "rldoctor": ask_rldoctor(log["config"], log["rldoctor"]),
            "rlprobe": ask_rlprobe(log["config"], log["rlprobe"]),
        }
        print(json.dumps(said), flush=True)
