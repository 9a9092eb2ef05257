"""What takes NCCL's place on CPUs: a group of a trainer and the workers of servers, through a TCP store of PyTorch.

Unlike a process group, it can be given up while a worker waits for a tensor. A server imports this file too, in an
environment that has PyTorch and not Cavesson.
"""

import time
from collections.abc import Callable
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = 100.0
"""Seconds after which a worker gives up; NCCL waits for ever."""
_BYTES = 128
"""Length of an identity, as NCCL has it."""
_masters: list[Any] = []
"""Stores of this process, which must exist until all have joined."""


class StoreGroup:
    """Has the methods of `NcclGroup`, and those of the communicator of vLLM's workers.

    A worker stops waiting for others when it is `closed`.
    """

    def __init__(
        self, identity: bytes, size: int, device: Any = None, rank: int = 0, closed: Event | None = None
    ) -> None:
        assert len(identity) == _BYTES and rank in range(size)
        self._rank, self._size, self._closed, self._sent = rank, size, closed or Event(), 0
        self._device = device
        self._store = dist.TCPStore("127.0.0.1", int(identity.rstrip(b"\0")), wait_for_workers=False)
        assert self._store.add(f"rank {rank}", 1) == 1, "two workers have one rank"
        self._store.add("here", 1)
        self._wait(lambda: self._store.add("here", 0) == size)

    @staticmethod
    def new_identity() -> bytes:
        _masters.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        return str(_masters[-1].port).encode().ljust(_BYTES, b"\0")

    @staticmethod
    def check(device: object, servers: object) -> None:
        pass

    def broadcast(self, tensor: Tensor, src: int = 0, stream: object = None) -> None:
        """Send a tensor, or wait for it; it must have the dtype and shape that the trainer's has."""
        self._sent += 1
        key, kind = str(self._sent), f"{tensor.dtype} {list(tensor.shape)} ".encode()
        assert src == 0 and tensor.is_contiguous()
        if self._rank == src:
            assert tensor.device.type == self._device.type
            self._store.set(key, kind + tensor.cpu().flatten().view(torch.uint8).numpy().tobytes())
            return
        self._wait(lambda: self._store.check([key]))
        sent = self._store.get(key)
        assert sent.startswith(kind), f"expected {kind!r}, not {sent[: len(kind)]!r}"
        tensor.flatten().view(torch.uint8).copy_(torch.frombuffer(bytearray(sent[len(kind) :]), dtype=torch.uint8))
        self._store.add("got", 1)

    def is_idle(self) -> bool:
        return bool(self._store.add("got", 0) == self._sent * (self._size - 1))

    def destroy(self) -> None:
        self._closed.set()

    def _wait(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not is_done():
            if self._closed.is_set() or time.monotonic() > deadline:
                raise RuntimeError("others of the group did not come")
            time.sleep(0.001)
