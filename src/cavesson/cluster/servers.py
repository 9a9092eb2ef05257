"""vLLM servers of a run on a Ray cluster; each is started by an actor on its node."""

import ray
from ray.exceptions import RayActorError

from cavesson.algorithms.runs import RolloutRun
from cavesson.cluster.connection import actors, check_placed, enter, result
from cavesson.errors import ServerError, first_line
from cavesson.models.load import prepare, with_pad_token
from cavesson.models.trained import load_start
from cavesson.rollout.engines.vllm_server import VllmServer, saved_model

ROLE = "server"


class Server:
    """An actor that starts and ends a vLLM server on its node; the folder is for relative paths in the settings."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._server: VllmServer | None = None

    def start(self, settings: RolloutRun, longest: int, adapters: int) -> tuple[str, str]:
        """Start a server with the model that training starts from, if none is running; return its URL and its key.

        Prompt and response together have at most `longest` tokens; `adapters` are sampled from at the same time.

        Raises:
            UserError: vLLM is not installed on this node, or the server ended before it was ready.
        """
        if self._server is None or self._server.ended() is not None:
            enter(self._folder)
            lora = settings.model.lora
            # Their names are texts if Ray was started with UUIDs in CUDA_VISIBLE_DEVICES.
            vllm = settings.sampling.vllm.model_copy(update={"devices": tuple(ray.get_gpu_ids())})
            tokenizer = with_pad_token(settings.load_tokenizer(), settings.model.path)
            model = prepare(load_start(settings.model, None))
            folder = saved_model(model, tokenizer, is_trained=lora is None)
            del model  # vLLM needs the memory
            rank, node = lora.rank if lora is not None else None, ray.util.get_node_ip_address()
            self._server = VllmServer(folder, vllm, settings.model.dtype, longest, rank, adapters, node)
        return self._server.url, self._server.key

    def has_died(self) -> bool:
        """Return whether the server has ended, or was lost with its node, so that Ray has restarted this actor."""
        if self._server is None:
            return bool(ray.get_runtime_context().was_current_actor_reconstructed)
        return self._server.ended() is not None

    def close(self) -> None:
        """End the server and remove its files."""
        if self._server is not None:
            self._server.close()


def start_servers(settings: RolloutRun, longest: int, adapters: int) -> tuple[tuple[str, str], ...]:
    """Start the vLLM servers of a run and return the URL and the key of each; arguments as for `Server.start`.

    Raises:
        UserError: no node had room for a server, it cannot be started, or its node died.
    """
    role = settings.ray.servers
    servers = actors(ROLE, role.count)
    check_placed("vLLM servers", "servers", role, [one.has_died.remote() for one in servers], settings.ray.timeout)
    starting = [server.start.remote(settings, longest, adapters) for server in servers]
    try:
        return tuple(result(one) for one in starting)
    except RayActorError as error:
        raise ServerError(f"a vLLM server was lost while it started ({first_line(error)})") from error
