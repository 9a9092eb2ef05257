"""A vLLM server on this machine, which lives as long as the run that has started it."""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import httpx
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cavesson.errors import UserError
from cavesson.models.parts import untied
from cavesson.rollout.engines import supervisor
from cavesson.rollout.engines.guarded import cavesson_guard
from cavesson.rollout.engines.settings import VllmSettings
from cavesson.scratch import Scratch

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of adapters that vLLM can be started for."""
_LONGEST_START = 1800.0
_LONGEST_LINE = 500
_ERROR = re.compile(r"(?:^|\] )((?:\w+\.)*\w*(?:Error|Exception): .*)$", re.MULTILINE)
"""The last line of a traceback, as Python prints it or as vLLM logs it."""
_FLAGS = (
    "--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
    "--middleware", "cavesson_guard.Guard",
)  # fmt: skip
"""What every server needs: token ids in and out, and log-probabilities of the distribution that is sampled from."""
NCCL_FLAGS = ("--weight-transfer-config", '{"backend": "nccl"}')
"""What a server needs to get all weights by NCCL."""
_ON_CPU = ("--no-enable-chunked-prefill",)
"""On CPUs, vLLM 0.32 crashes if it reads the text of a request with a seed in several parts: it then sets back the
generator of random numbers, which PyTorch can only do on GPUs."""


class VllmServer:
    """A server on a free port of this machine, at the address `host`, ready for requests, which need its key.

    The `folder` with the model and its tokenizer is removed with the server. `longest` counts the tokens of the longest
    prompt and response together; `lora_rank` is None without adapters, of which at most `adapters` are sampled from at
    the same time.

    Raises:
        UserError: vLLM is not installed, or the server ended before it was ready.
    """

    def __init__(
        self,
        folder: Scratch,
        settings: VllmSettings,
        dtype: str,
        longest: int,
        lora_rank: int | None,
        adapters: int = 1,
        host: str = "127.0.0.1",
    ) -> None:
        self.folder = folder
        python = settings.python or sys.executable
        _check_installed(python)
        held = hold_port(host)
        port = held.getsockname()[1]
        self.url = f"http://{host}:{port}"
        self.key = secrets.token_urlsafe(32)
        self._log = NamedTemporaryFile(prefix="cavesson-vllm-", suffix=".log")  # noqa: SIM115  # for the run
        flags = ["--model", folder.name, "--dtype", dtype, "--max-model-len", str(longest), "--port", str(port)]
        command = [python, cavesson_guard.__file__, "--host", host, *flags, *_FLAGS]
        parallel = ["--tensor-parallel-size", str(len(settings.devices))] if len(settings.devices) > 1 else []
        command += [*_lora_flags(lora_rank, adapters), *parallel]
        command += ["--enable-sleep-mode"] if settings.sleep else []
        command += NCCL_FLAGS if settings.transfer == "nccl" else []
        command += [*(() if settings.devices else _ON_CPU), *settings.arguments]
        self._process = subprocess.Popen(
            [sys.executable, "-I", supervisor.__file__, str(os.getpid()), *command],
            env=_environment(settings, python, self.key),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the run, which ends the server itself
        )
        self._end = weakref.finalize(self, _end, self._process, held)  # at the latest when this process ends
        self._wait()

    def close(self) -> None:
        """End the server, and remove its folder."""
        self.folder.cleanup()
        self._end()

    def ended(self) -> str | None:
        """Return why the server no longer runs, or None if it does."""
        code = self._process.poll()
        if code is None:
            return None
        if code < 0:
            return f"the vLLM server was killed by {signal.Signals(-code).name}"
        log = Path(self._log.name).read_text("utf-8", "replace")
        # Of several errors, the first is the cause: those after it are of processes that waited for that one.
        found = _ERROR.search(log)
        why = found[1] if found else (log.strip().splitlines() or ["it printed nothing"])[-1]
        return f"the vLLM server ended with exit code {code}: {why.strip()[:_LONGEST_LINE]}"

    def _wait(self) -> None:
        """Wait until the server answers."""
        deadline = time.monotonic() + _LONGEST_START
        while True:
            why = self.ended()
            if why is None and time.monotonic() > deadline:
                self.close()
                why = f"the vLLM server was not ready after {_LONGEST_START:.0f} s"
            if why is not None:
                raise UserError(why)
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).is_success:
                    return
            time.sleep(0.5)


def hold_port(host: str) -> socket.socket:
    """Return a socket that holds a free port until it is closed.

    A server binds its port only seconds after it has started. If another process got the port meanwhile, the run would
    sample from that process's model.
    """
    held = socket.socket()
    # The server sets this option too, so it can listen on the port. The kernel chooses a held port for nobody else.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def saved_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, is_trained: bool) -> Scratch:
    """Save a model without adapters for a server; the folder is removed with the object.

    vLLM (0.32) does not reload an output head that shares the embedding, so a server whose weights will be replaced
    gets a copy of it.
    """
    folder = Scratch("served")
    with untied(model) if is_trained else nullcontext():
        model.save_pretrained(folder.name)
    tokenizer.save_pretrained(folder.name)
    return folder


def _check_installed(python: str) -> None:
    command = [python, "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"]
    try:
        found = subprocess.run(command, capture_output=True).returncode == 0
    except OSError as error:
        raise UserError(f"sampling.vllm.python {python}: {error.strerror}") from error
    if not found:
        raise UserError(
            f'sampling.engine "vllm" needs vLLM, which {python} does not have; install it with: '
            f"{python} -m pip install vllm, or set sampling.vllm.python to a Python that has it"
        )


def _lora_flags(rank: int | None, adapters: int) -> Sequence[str]:
    if rank is None:
        return ()
    most = next((size for size in LORA_RANKS if size >= rank), None)
    if most is None:
        raise UserError(f"model.lora.rank {rank} is more than vLLM can serve, {LORA_RANKS[-1]}")
    return ("--enable-lora", "--max-loras", str(adapters), "--max-lora-rank", str(most))


def _environment(settings: VllmSettings, python: str, key: str) -> dict[str, str]:
    """Return the environment of the server: it is not one of the processes that a launcher has started.

    In the environment, unlike among the arguments, other users of the machine cannot see the key.
    """
    launched = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
    others = {"PYTHONPATH"} if python != sys.executable else set()
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in launched | others and not name.startswith("TORCHELASTIC_")
    }
    # Of the server's own functions, these load adapters and weights.
    kept |= {"VLLM_API_KEY": key, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    kept.setdefault("VLLM_NO_USAGE_STATS", "1")
    return kept | ({"CUDA_VISIBLE_DEVICES": ",".join(map(str, settings.devices))} if settings.devices else {})


def _end(process: "subprocess.Popen[bytes]", held: socket.socket) -> None:
    """End a server and what it has started: an engine can outlive a server that was killed, and holds its memory."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(supervisor.PATIENCE + 1)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    held.close()
