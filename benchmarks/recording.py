"""What recording costs: the demo's run with its recorder (--mode on) and without it (--mode off).

With it, the two places where recording can cost time are measured directly: seconds that the training thread spends in
the recorder's calls, and CPU seconds of the recorder's own thread.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import enumerate as threads
from typing import Any

import work

from cavesson import PPORun, Recorder, Training
from cavesson.config import load
from cavesson.demo.run import TRAINING
from cavesson.demo.settings import RECIPE


class TimedRecorder(Recorder):
    """A recorder that knows how long its caller has been inside it."""

    waited = 0.0

    def rollouts(self, *given: Any) -> None:
        start = time.perf_counter()
        super().rollouts(*given)
        self.waited += time.perf_counter() - start

    def metrics(self, *given: Any) -> None:
        start = time.perf_counter()
        super().metrics(*given)
        self.waited += time.perf_counter() - start


def thread_seconds(name: str) -> float:
    """CPU seconds of a running thread so far."""
    (identity,) = (thread.ident for thread in threads() if thread.name == name)
    assert identity is not None
    return time.clock_gettime(time.pthread_getcpuclockid(identity))


def main() -> None:
    """Print seconds and, with the recorder, the seconds it took and their share of all."""
    given = work.arguments(__doc__, ("on", "off"))
    with TemporaryDirectory() as name:
        folder = Path(name) / "run"
        flags = {"run": folder, "model.path": given.model, "batch_size": given.batch, "steps": given.steps}
        flags |= {"model.gguf_file": "none", "checkpoint.every": 0}
        settings = load(PPORun, RECIPE, [f"--{flag}={value}" for flag, value in flags.items()])
        trainer = Training(settings, prompts=TRAINING).trainer
        recorder = TimedRecorder(folder) if given.mode == "on" else None
        trainer.recorder = recorder
        numbers: dict[str, float] = {}
        tokens = 0.0
        start = time.perf_counter()
        for step in range(given.steps):
            metrics = trainer.step(step)
            tokens += metrics["length/response_mean"] * given.batch
        if recorder is not None:
            recorder.flush()
        seconds = time.perf_counter() - start
        if recorder is not None:
            thread = thread_seconds("recorder")
            recorder.close()
            numbers = {"training_thread_seconds": recorder.waited, "recorder_thread_seconds": thread}
            numbers["share"] = (recorder.waited + thread) / seconds
        work.print_json(
            {"seconds": seconds, "response_tokens_per_second": tokens / seconds, "peak_rss_gib": work.peak_gib()}
            | numbers
        )


if __name__ == "__main__":
    main()
