"""All weights of a policy, from GPU to GPU: NCCL sends them to vLLM servers through their weight-transfer API.

A server's workers receive one tensor after another (unpacked, in vLLM's words), with the names of a checkpoint.
"""

import base64
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from itertools import accumulate
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from cavesson.errors import ServerError, UserError, first_line
from cavesson.models.parts import causal
from cavesson.processes import Processes
from cavesson.rollout.engines.nccl import Communicator, new_identity, unavailable
from cavesson.rollout.engines.vllm_client import VllmClient
from cavesson.rollout.engines.vllm_server import NCCL_FLAGS

_IN_FLIGHT = 1 << 30
"""Bytes that are sent before the trainer waits until servers have them."""


class NcclGroup:
    """An NCCL group of `size` ranks: the trainer, which is rank 0 on a `device`, and the workers of all servers.

    They share an `identity` from `new_identity`. The constructor blocks until all of them have joined, without a limit
    of time.

    Raises:
        RuntimeError: NCCL failed.
    """

    def __init__(self, identity: bytes, size: int, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._communicator = Communicator(identity, size)
            # A separate stream: if a server does not receive, everything else on the GPU goes on.
            self._stream = torch.cuda.Stream(device)
            number = torch.zeros(1, device=device)
            self._communicator.sum(number, self._after(device))  # workers of vLLM begin with the same
            self._stream.synchronize()

    @staticmethod
    def new_identity() -> bytes:
        """Return an identity for a new group."""
        return new_identity()

    @staticmethod
    def check(device: torch.device, servers: Sequence[int]) -> None:
        """Check that NCCL can connect this process to a server on these GPUs, as the machine counts them.

        Raises:
            UserError: the policy is not on a GPU, or on one of the server's, or PyTorch has no NCCL.
        """
        name = 'sampling.vllm.transfer "nccl"'
        if device.type != "cuda":
            raise UserError(f'{name} sends weights from GPU to GPU, but the policy is on {device.type}; use "files"')
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        number = visible[device.index] if device.index < len(visible) and visible[0] else str(device.index)
        if number in map(str, servers):
            raise UserError(
                f"{name} cannot connect two processes on one GPU, but GPU {number} trains and is one of "
                'sampling.vllm.devices; use "files", or another GPU'
            )
        if why := unavailable():
            raise UserError(f'{name} needs a PyTorch with NCCL ({why}); use "files"')

    def broadcast(self, tensor: Tensor) -> None:
        """Begin to send a contiguous tensor on this group's GPU to all workers; it must exist until `is_idle`."""
        self._communicator.broadcast(tensor, self._after(tensor.device))

    def is_idle(self) -> bool:
        """Return whether everything has been sent."""
        return self._stream.query()

    def _after(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of the group, which first waits for all work that is queued on the GPU."""
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return self._stream


class WeightTransfer:
    """Sends all weights of a policy to the workers of all servers.

    New weights take `begin` and `finish` on the main process, and between them `stream` on all processes together. No
    process ever holds all weights of a sharded policy, of which `skeleton` is the model without its weights.
    """

    def __init__(self, model: Any, skeleton: Any, processes: Processes, client: VllmClient) -> None:
        self.model, self.processes, self.client = model, processes, client
        # What is trained in lower precision is kept in float32 while it is sharded.
        self._dtypes = {name: like.dtype for name, like in (skeleton or model).state_dict().items()}
        self._requests = ThreadPoolExecutor(1, "weights")
        self._group: NcclGroup | None = None
        self._receiving: Future[None] = Future()
        self._error: ServerError | None = None
        self._in_flight: list[Tensor] = []

    def begin(self, while_sampling: bool) -> None:
        """Let the servers wait for the weights; arguments as for `VllmClient.load_weights`.

        Raises:
            ServerError: a server failed, or NCCL cannot connect to it.
        """
        if self._group is None:
            self._group = self._joined()
        names, dtypes, shapes = [], [], []
        for name, weight in self.model.state_dict().items():
            bare = torch.empty(weight.shape, dtype=self._dtypes[name], device="meta")
            for part, tensor in self._in_checkpoint(name, bare):
                names.append(part)
                dtypes.append(str(tensor.dtype).removeprefix("torch."))
                shapes.append(list(tensor.shape))
        self.client.begin_weights(while_sampling)
        told = {"update_info": {"names": names, "dtype_names": dtypes, "shapes": shapes}}
        self._receiving = self._begun("/update_weights", [told] * len(self.client.servers))

    @torch.no_grad()
    def stream(self) -> None:
        """Send the weights one by one; if that fails, `finish` says why.

        All processes join each sharded weight in turn, even after an error, so that none of them waits for the others.
        """
        for name, weight in self.model.state_dict().items():
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            self.processes.beat()
            if self.processes.is_main and not self._has_failed:
                self._send(name, whole.to(self.processes.device, self._dtypes[name]))
        if self.processes.is_main:
            self._flush()

    def finish(self, version: str, while_sampling: bool) -> None:
        """Let the servers use the weights under a name; arguments as for `VllmClient.load_weights`.

        Raises:
            ServerError: a server or NCCL failed, now or while the weights were sent.
        """
        if self._error is not None:
            raise self._error
        self._receiving.result()
        self.client.finish_weights(version, while_sampling)

    def _in_checkpoint(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield a weight as checkpoints contain it: the experts of a layer, for example, are separate weights there."""
        yield from revert_weight_conversion(causal(self.model), {name: weight}).items()

    def _send(self, name: str, weight: Tensor) -> None:
        assert self._group is not None, "begin comes first"
        try:
            for _, part in self._in_checkpoint(name, weight):
                self._in_flight.append(part.contiguous())
                self._group.broadcast(self._in_flight[-1])
        except RuntimeError as error:
            self._error = ServerError(f"NCCL failed while weights were sent to vLLM servers: {first_line(error)}")
        if sum(part.nbytes for part in self._in_flight) >= _IN_FLIGHT:
            self._flush()

    def _flush(self) -> None:
        """Wait until workers have what was sent, or until that has failed."""
        assert self._group is not None, "begin comes first"
        while not self._has_failed and not self._group.is_idle():
            time.sleep(0.001)
        self._in_flight.clear()

    @property
    def _has_failed(self) -> bool:
        done = self._receiving.done() and self._receiving.exception() is not None
        return done or self._error is not None

    def _joined(self) -> NcclGroup:
        """Return a group of this process and all workers; raise ServerError if a server or NCCL cannot join."""
        sizes, identity = self.client.world_sizes(), NcclGroup.new_identity()
        shared = {"nccl_unique_id_b64": base64.b64encode(identity).decode(), "world_size": 1 + sum(sizes)}
        offsets = accumulate([1, *sizes[:-1]])
        try:
            self.client.each("/shutdown_weight_transfer_engine", [{}] * len(sizes))  # that of an earlier run
        except ServerError as error:
            raise ServerError(f"{error}; restart it if a run was killed while it sent weights") from error
        asked = self._begun(
            "/init_weight_transfer_engine", [{"init_info": {**shared, "rank_offset": offset}} for offset in offsets]
        )
        joined: Future[NcclGroup] = Future()

        def join() -> None:
            try:
                joined.set_result(NcclGroup(identity, 1 + sum(sizes), self.processes.device))
            except Exception as error:
                joined.set_exception(error)

        # If a worker does not come, NCCL waits for ever.
        Thread(target=join, name="cavesson-nccl", daemon=True).start()
        both: list[Future[Any]] = [asked, joined]
        for done in wait(both, return_when=FIRST_EXCEPTION).done:
            why = done.exception()
            if why is not None:
                raise ServerError(
                    f"NCCL cannot connect to the vLLM servers: {first_line(why)}; start them with "
                    f"{shlex.join(NCCL_FLAGS)}, on other GPUs than those of training and with the same version of NCCL"
                ) from why
        return joined.result()

    def _begun(self, path: str, contents: Sequence[dict[str, Any]]) -> Future[None]:
        """Begin a request to each server, and return a future of all of them, or of the first that fails."""
        return self._requests.submit(self.client.each, path, contents)
