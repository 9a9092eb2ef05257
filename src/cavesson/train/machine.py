"""What the machine does while a run trains; docs/machine.md explains the figures."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from threading import Event, Lock, Thread
from typing import Any

import psutil
import torch

from cavesson.train.update import Metrics

GIB = 2**30
SECONDS = 1.0
"""Between two samples of the GPUs."""


class Machine:
    """Measures the processors, the memory and the GPUs between two calls of `metrics`; a context manager.

    Processors count what they did. A GPU only tells what it does at the moment, so a thread samples it.
    """

    def __init__(self, device: torch.device) -> None:
        gpus = gpu_reader() if device.type == "cuda" else None
        self._gpus = None if gpus is None else Sampled(gpus, SECONDS)
        self._process = psutil.Process()
        psutil.cpu_percent()  # each call says what was used since the one before
        self._process.cpu_percent()

    def metrics(self) -> Metrics:
        """Return the figures since the last call, or since the beginning."""
        memory = psutil.virtual_memory()
        return {
            "machine/cpu": psutil.cpu_percent(),
            "machine/memory": (memory.total - memory.available) / GIB,
            "machine/process/cpu": self._process.cpu_percent() / (psutil.cpu_count() or 1),
            "machine/process/memory": self._process.memory_info().rss / GIB,
            **({} if self._gpus is None else self._gpus.metrics()),
        }

    def __enter__(self) -> "Machine":
        if self._gpus is not None:
            self._gpus.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._gpus is not None:
            self._gpus.stop()


class Sampled:
    """Calls a function at intervals, in a thread, and returns the means of what it has read."""

    def __init__(self, read: Callable[[], Metrics], seconds: float) -> None:
        self._read, self._seconds = read, seconds
        self._seen: dict[str, list[float]] = defaultdict(list)
        self._lock, self._stopped = Lock(), Event()
        self._thread = Thread(target=self._sample, name="machine", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reading; a reading that hangs is not waited for."""
        self._stopped.set()
        self._thread.join(2 * self._seconds)

    def metrics(self) -> Metrics:
        """Read once more; return the mean of each figure since the last call, and the highest of each `memory`."""
        self._take()
        with self._lock:
            seen, self._seen = self._seen, defaultdict(list)
        means = {name: sum(values) / len(values) for name, values in seen.items()}
        return means | {f"{name}_peak": max(values) for name, values in seen.items() if name.endswith("/memory")}

    def _sample(self) -> None:
        while not self._stopped.wait(self._seconds):
            self._take()

    def _take(self) -> None:
        values = self._read()
        with self._lock:
            for name, value in values.items():
                self._seen[name].append(value)


GPU_FIGURES: dict[str, Callable[[Any, Any], float]] = {
    "utilization": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "memory": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / GIB,
    "temperature": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "power": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,  # of milliwatts
}


def gpu_reader() -> Callable[[], Metrics] | None:
    """Return what reads the GPUs that this process sees from NVML, or None without nvidia-ml-py or NVIDIA's driver."""
    if find_spec("pynvml") is None:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    gpus = {}
    for index in range(torch.cuda.device_count()):
        with suppress(pynvml.NVMLError):  # of a part of a GPU (MIG), NVML does not know the figures
            gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
            gpus[f"machine/gpu/{pynvml.nvmlDeviceGetIndex(gpu)}"] = gpu
    return partial(_read, pynvml, gpus)


def _read(nvml: Any, gpus: dict[str, Any]) -> Metrics:
    """Return the figures that each GPU has at the moment."""
    found = {}
    for name, gpu in gpus.items():
        for figure, read in GPU_FIGURES.items():
            with suppress(nvml.NVMLError):
                found[f"{name}/{figure}"] = float(read(nvml, gpu))
    return found
