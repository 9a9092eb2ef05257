"""What recording costs: the demo's run with its recorder (--mode on) and without it (--mode off).

With it, the places where recording can cost time are measured directly: seconds that the training thread spends on its
rollouts (`time/record`) and on its metrics, and CPU seconds of the recorder's two threads, which write and, in runs of
more than ten minutes, merge what was written.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import enumerate as threads

import work

from cavesson import PPORun, Recorder, Training
from cavesson.config import load
from cavesson.demo.run import TRAINING
from cavesson.demo.settings import RECIPE


def thread_seconds(name: str) -> float:
    """CPU seconds of a thread so far, or 0 if there is none of this name."""
    found = [thread.ident for thread in threads() if thread.name == name and thread.ident is not None]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(identity)) for identity in found)


def seconds_of_metrics(recorder: Recorder, step: int, metrics: dict[str, float]) -> float:
    """Record the metrics of a step, as a run's `Log` does, and return the seconds that this took."""
    start = time.perf_counter()
    recorder.metrics(step, metrics)
    return time.perf_counter() - start


def main() -> None:
    """Print seconds and, with the recorder, the seconds it took and their share of all."""
    given = work.arguments(__doc__, ("on", "off"))
    with TemporaryDirectory() as name:
        folder = Path(name) / "run"
        flags = {"run": folder, "model.path": given.model, "batch_size": given.batch, "steps": given.steps}
        flags |= {"model.gguf_file": "none", "checkpoint.every": 0}
        settings = load(PPORun, RECIPE, [f"--{flag}={value}" for flag, value in flags.items()])
        trainer = Training(settings, prompts=TRAINING).trainer
        recorder = Recorder(folder) if given.mode == "on" else None
        trainer.recorder = recorder
        numbers: dict[str, float] = {}
        tokens = waited = 0.0
        start = time.perf_counter()
        for step in range(given.steps):
            metrics = trainer.step(step)
            tokens += metrics["length/response_mean"] * given.batch
            if recorder is not None:
                waited += metrics["time/record"] + seconds_of_metrics(recorder, step, metrics)
        if recorder is not None:
            recorder.flush()
        seconds = time.perf_counter() - start
        if recorder is not None:
            thread, merger = thread_seconds("recorder"), thread_seconds("merger")
            recorder.close()
            numbers = {"training_thread_seconds": waited, "recorder_thread_seconds": thread}
            numbers |= {"merger_thread_seconds": merger, "share": (waited + thread + merger) / seconds}
        work.print_json(
            {"seconds": seconds, "response_tokens_per_second": tokens / seconds, "peak_rss_gib": work.peak_gib()}
            | numbers
        )


if __name__ == "__main__":
    main()
