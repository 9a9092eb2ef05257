"""NCCL, as far as one sender of weights needs it.

With PyTorch 2.11, `torch.cuda.nccl` cannot create a communicator on Python 3.10 or newer: it parses its arguments in a
way that Python no longer supports. The library that PyTorch has loaded is called directly.
"""

from ctypes import CDLL, POINTER, Structure, byref, c_char, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cavesson.errors import first_line

_DTYPES = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7,
    torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
"""ncclDataType_t of nccl.h."""
_SUM = 0
"""ncclRedOp_t of nccl.h."""


class _Identity(Structure):
    _fields_ = (("internal", c_char * 128),)


class Communicator:
    """A group of `size` processes with an `identity` from `new_identity`, of which this one is rank 0.

    The constructor waits for all of them.

    Raises:
        RuntimeError: NCCL failed.
    """

    def __init__(self, identity: bytes, size: int) -> None:
        self._handle = c_void_p()
        _call("ncclCommInitRank", byref(self._handle), size, _Identity.from_buffer_copy(identity), 0)

    def broadcast(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Send a contiguous tensor to all others, on a stream."""
        self._run("ncclBroadcast", tensor, 0, stream)

    def sum(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Sum a contiguous tensor over all, in place, on a stream."""
        self._run("ncclAllReduce", tensor, _SUM, stream)

    def _run(self, name: str, tensor: Tensor, how: int, stream: torch.cuda.Stream) -> None:
        """Begin an operation in place; `how` is the rank that sends, or what is computed."""
        if tensor.dtype not in _DTYPES:
            raise RuntimeError(f"NCCL cannot send {tensor.dtype}")
        address, queue = c_void_p(tensor.data_ptr()), c_void_p(stream.cuda_stream)
        _call(name, address, address, tensor.numel(), _DTYPES[tensor.dtype], how, self._handle, queue)


def new_identity() -> bytes:
    """Return an identity for a new group."""
    identity = _Identity()
    _call("ncclGetUniqueId", byref(identity))
    return bytes(identity)


def unavailable() -> str | None:
    """Return why NCCL cannot be used, or None if it can."""
    try:
        _library()
    except OSError as error:
        return first_line(error)
    return None


@cache
def _library() -> Any:
    library = CDLL("libnccl.so.2")  # found, because PyTorch has loaded it
    buffers = [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p]
    for name, kinds in {
        "ncclGetUniqueId": [POINTER(_Identity)],
        "ncclCommInitRank": [POINTER(c_void_p), c_int, _Identity, c_int],
        "ncclBroadcast": buffers,
        "ncclAllReduce": buffers,
    }.items():
        getattr(library, name).argtypes = kinds
    library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = [c_int], c_char_p
    return library


def _call(name: str, *arguments: Any) -> None:
    library = _library()
    if code := getattr(library, name)(*arguments):
        raise RuntimeError(f"{name}: {library.ncclGetErrorString(code).decode()}")
