"""Make rows that ask for the rhyme word alone.

python recipes/rhyme/words.py data/tang-couplets.jsonl data/tang-words.jsonl

The prompt is a couplet and the next one up to its last character; the response is that character and the full stop.
"""

import json
import sys
from pathlib import Path

source, target = map(Path, sys.argv[1:])
with source.open(encoding="utf-8") as rows, target.open("w", encoding="utf-8") as out:
    for line in rows:
        row = json.loads(line)
        words = {"prompt": row["couplet"] + row["next"][:-2], "response": row["next"][-2:]}
        out.write(f"{json.dumps(words, ensure_ascii=False)}\n")
