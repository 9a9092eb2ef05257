"""Examples for fine-tuning and reward models that all sides learn from, the same in every run.

Imported by TRL's own environment as well: nothing but the standard library.
"""

from random import Random

LENGTHS = (10, 20, 40, 80, 160)
"""words of a response"""
MAX_LENGTH = 256
"""tokens of prompt and response; all of them fit"""

AT_ONCE = 2
"""examples of a micro-batch, on all sides"""

_WORDS = """
a about after all also an and any are as at back be because been before but by can come could day did do down even
find first for from get give go good had has have he her here him his how if in into is it its just know like look
made make man many may me more most much must my new no not now of on one only or other our out over people say see
she so some take than that the their them then there these they think this those time to two up us use very want was
way we well were what when which who will with work would year you your
"""


def demonstrations(count: int) -> list[dict[str, str]]:
    """Rows of `prompt` (10 words) and `completion` (10 to 160 words)."""
    random = Random(0)
    return [
        {"prompt": _text(random, 10), "completion": f" {_text(random, random.choice(LENGTHS))}"} for _ in range(count)
    ]


def pairs(count: int) -> list[dict[str, str]]:
    """Rows of `prompt` (10 words), `chosen` and `rejected` (10 to 160 words each)."""
    random = Random(0)
    return [
        {"prompt": _text(random, 10)}
        | {side: f" {_text(random, random.choice(LENGTHS))}" for side in ("chosen", "rejected")}
        for _ in range(count)
    ]


def _text(random: Random, words: int) -> str:
    return " ".join(random.choices(_WORDS.split(), k=words))
