"""How fast RL Logging Board files are imported, and with how much memory: 100 and 400 MB, each in its own process.

Beside it, where the processor time goes: to reading, of which parsing JSON is the part that no import can do without,
and to writing, which is tables, statistics, roll-ups and compression.
"""

import argparse
import json
import os
import resource
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
    """Import and print seconds, MB/s, processor time and the peak memory of this process and of the largest other."""
    from cavesson.importers import import_run

    start, cpu = time.perf_counter(), cpu_seconds()
    report = import_run(source, run)
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    megabytes = source.stat().st_size / 1e6
    numbers = {"MB": megabytes, "rollouts": report.rollouts, "seconds": seconds, "MB_per_second": megabytes / seconds}
    other = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    memory = {"peak_rss_gib": work.peak_gib(), "peak_rss_gib_of_another_process": other}
    work.print_json(numbers | {"cpu_ms_per_MB": 1000 * cpu / megabytes} | memory)


def cpu_seconds() -> float:
    """Of this process and of those that it has started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def stages(source: Path, run: Path) -> None:
    """Print the processor milliseconds per MB of each stage in one process, the least over the parts of a file."""
    import orjson

    from cavesson.importers.batch import RolloutBuffer
    from cavesson.importers.importing import AT_ONCE
    from cavesson.importers.processes import prepare
    from cavesson.importers.reading import File
    from cavesson.importers.rl_logging_board import FORMAT

    prepare()
    batch = RolloutBuffer(run, FORMAT)
    found: dict[str, list[float]] = {"parse_json": [], "read": [], "write": []}
    for part, again in zip(File(source).parts(AT_ONCE), File(source).parts(AT_ONCE), strict=True):
        lines = [record.content for record in part.read(last=True)]
        marks = [time.thread_time()]
        for line in lines:
            orjson.loads(line)
        marks.append(time.thread_time())
        steps = batch.read([again]).steps
        marks.append(time.thread_time())
        batch.write(dict.fromkeys(steps, 0))
        marks.append(time.thread_time())
        megabytes = sum(map(len, lines)) / 1e6
        for name, seconds in zip(found, np.diff(marks), strict=True):
            found[name].append(1000 * seconds / megabytes)
    work.print_json({f"{name}_ms_per_MB": min(values) for name, values in found.items()})


def main() -> None:
    """Write the files and measure each in its own process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 400])
    parser.add_argument("--measure", type=Path, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--stages", type=Path, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(*given.measure)
        return
    if given.stages:
        stages(*given.stages)
        return
    with TemporaryDirectory() as folder:
        for megabytes in given.megabytes:
            source = Path(folder) / f"{megabytes}.jsonl"
            write(source, megabytes)
            run = str(Path(folder) / f"run-{megabytes}")
            subprocess.run([sys.executable, __file__, "--measure", str(source), run], check=True)
        subprocess.run([sys.executable, __file__, "--stages", str(source), f"{run}-stages"], check=True)


if __name__ == "__main__":
    main()
