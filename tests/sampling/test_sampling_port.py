"""The port of a vLLM server that a run starts belongs to this server alone."""

import errno
import socket

import pytest

from cavesson.rollout.engines.vllm_server import hold_port

HOST = "127.0.0.1"
PORT_RANGE = 51
"""Linux's IP_LOCAL_PORT_RANGE, which Python does not name: among which ports the kernel chooses."""


def only(port: int) -> socket.socket:
    """A socket for which the kernel can choose no other port."""
    chosen = socket.socket()
    chosen.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        chosen.setsockopt(socket.IPPROTO_IP, PORT_RANGE, (port << 16 | port).to_bytes(4, "little"))
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
        pytest.skip("needs Linux 6.3 or newer")
    return chosen


def test_a_held_port_is_given_to_nobody_else() -> None:
    with hold_port(HOST) as held, socket.create_server((HOST, 0)) as elsewhere:
        port = held.getsockname()[1]
        for host in (HOST, ""):
            with only(port) as server, pytest.raises(OSError, match="in use"):
                server.bind((host, 0))
        with only(port) as client, pytest.raises(OSError, match="Cannot assign"):
            client.connect(elsewhere.getsockname())
    with only(port) as server:
        server.bind((HOST, 0))
        assert server.getsockname()[1] == port


def test_a_server_listens_on_the_port_that_is_held_for_it() -> None:
    with hold_port(HOST) as held:
        with socket.create_server(held.getsockname()), socket.create_connection(held.getsockname()) as client:
            assert client.getpeername() == held.getsockname()
        with only(held.getsockname()[1]) as other, pytest.raises(OSError, match="in use"):
            other.bind((HOST, 0))  # it is still held after the server has ended
