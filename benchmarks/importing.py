"""How fast RL Logging Board files are imported, and with how much memory: 100 and 400 MB, each in its own process."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import work


def write(path: Path, megabytes: int) -> int:
    """Write rollouts of 20 to 300 tokens, 64 per step, with four float32 numbers per token; return how many."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 9, 5000)
    words = ["Ġ" + "".join(random.choice(list("etaoinshrdlu"), length)) for length in lengths]
    size = count = 0
    with path.open("w", encoding="utf-8") as file:
        while size < megabytes * 10**6:
            tokens = [words[i] for i in random.integers(0, len(words), random.integers(20, 300))]
            numbers = random.normal(0, 1, (4, len(tokens))).astype(np.float32).astype(np.float64).tolist()
            names = ("logprobs", "ref_logprobs", "values", "token_rewards")
            line = {"prompt": "".join(tokens[:20]), "response": "".join(tokens), "response_tokens": tokens}
            line |= dict(zip(names, numbers, strict=True)) | {"reward": float(len(tokens)), "step": count // 64}
            size += file.write(json.dumps(line) + "\n")
            count += 1
    return count


def measure(source: Path, run: Path) -> None:
    """Import and print seconds, MB/s and the peak memory of this process."""
    from dressage.importers import import_run

    start, cpu = time.perf_counter(), time.process_time()
    report = import_run(source, run)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    megabytes = source.stat().st_size / 1e6
    numbers = {"MB": megabytes, "rollouts": report.rollouts, "seconds": seconds, "MB_per_second": megabytes / seconds}
    work.print_json(numbers | {"cpu_ms_per_MB": 1000 * cpu / megabytes, "peak_rss_gib": work.peak_gib()})


def main() -> None:
    """Write the files and measure each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 400])
    parser.add_argument("--measure", type=Path, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(*given.measure)
        return
    with TemporaryDirectory() as folder:
        for megabytes in given.megabytes:
            source = Path(folder) / f"{megabytes}.jsonl"
            write(source, megabytes)
            run = str(Path(folder) / f"run-{megabytes}")
            subprocess.run([sys.executable, __file__, "--measure", str(source), run], check=True)


if __name__ == "__main__":
    main()
