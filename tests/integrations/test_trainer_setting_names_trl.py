"""The names of TRL's settings that the doctor shows are fields of TRL's own classes."""

import re
import subprocess

import pytest
from test_record_trl import NEEDS_OLD, PYTHONS

from cavesson.findings.trainers import NAMES

FIELDS = "import dataclasses; from {} import {} as Config; print(*[one.name for one in dataclasses.fields(Config)])"


def named(algorithm: str) -> set[str]:
    """Return the names for an algorithm and the settings that they depend on, without values, which are quoted."""
    several = [{algorithm: one} if isinstance(one, str) else one for one in NAMES["trl"].values()]
    texts = [name for names in several for who, name in names.items() if algorithm in who.split(", ")]
    return {word for text in texts for word in re.findall(r"[a-z]\w+", re.sub(r'"\w+"|vLLM', "", text))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "module", "version"),
    [
        ("GRPO", "trl", "1.16"),
        ("RLOO", "trl", "1.16"),
        pytest.param("PPO", "trl.experimental.ppo", "1.10", marks=NEEDS_OLD),
    ],
)
def test_trl_has_every_setting_that_is_named(algorithm, module, version):
    code = FIELDS.format(module, f"{algorithm}Config")
    fields = subprocess.run([PYTHONS[version], "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"learning_rate", "temperature"} < named(algorithm) <= set(fields)
