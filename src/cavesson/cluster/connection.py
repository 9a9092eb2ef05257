"""The connection of a process to the Ray cluster of its run, and what all kinds of actors share."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from cavesson.algorithms.settings import RoleSettings
from cavesson.command_line import ON_RAY
from cavesson.errors import UserError, first_line

_TIMEOUT = 10.0
"""Seconds in which a cluster must accept a connection."""


def is_on_ray() -> bool:
    """Return whether this process belongs to a run on a Ray cluster."""
    return ON_RAY in os.environ


def connect(address: str = "auto") -> Any:
    """Connect this process to the cluster of its run, if it is not connected yet, and return the module `ray`.

    All processes of a run use the namespace in the variable ON_RAY, so they find the same named actors.

    Args:
        address: HOST:PORT of the cluster; "auto" = the address in RAY_ADDRESS, or the cluster of this machine.

    Raises:
        UserError: Ray is not installed, or there is no cluster.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # it would copy the working directory to all nodes
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # by default, Ray tries 20 times, 40 seconds each
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError("--ray needs Ray; install it with: pip install 'cavesson[ray]'") from None
    if not ray.is_initialized():
        # When a node dies, Ray would print pages of its logs; the run itself reports it in one line.
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
        address = os.environ.get("RAY_ADDRESS") or "auto" if address == "auto" else address
        try:
            _check_listening(address)
            ray.init(address, namespace=os.environ[ON_RAY], log_to_driver=False, logging_level="ERROR")
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(
                f"ray.address {address!r}: there is no Ray cluster ({first_line(error)}); "
                "start one with ray start --head, or set ray.address or RAY_ADDRESS to HOST:PORT of one"
            ) from error
    return ray


def _check_listening(address: str) -> None:
    """Raise an OSError if nothing listens at HOST:PORT; Ray itself would wait 40 seconds before it says so."""
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT).close()


def options(role: RoleSettings) -> dict[str, Any]:
    """Return the resources of one process of a role, as options of a Ray actor."""
    return {"num_cpus": role.cpus, "num_gpus": role.gpus, "resources": dict(role.resources)}


def needs(role: RoleSettings) -> str:
    """Return the resources of one process of a role in words, such as "CPU 1, GPU 4"."""
    amounts = {"CPU": role.cpus, "GPU": role.gpus, **role.resources}
    return ", ".join(f"{name} {amount:g}" for name, amount in amounts.items() if amount) or "resources"


def actor_name(role: str, number: int) -> str:
    """Return the name of an actor of a run."""
    return f"{role}-{number}"


def actors(role: str, count: int) -> list[Any]:
    """Return the actors of a role, except those that have died and will not be restarted."""
    ray, found = connect(), []
    for number in range(count):
        with suppress(ValueError):  # no actor has this name any more
            found.append(ray.get_actor(actor_name(role, number)))
    return found


def check_placed(what: str, group: str, role: RoleSettings, answers: Sequence[Any], timeout: float) -> None:
    """Wait until Ray has started all actors of a role on some node; an actor that died afterwards counts as started.

    `what` are the actors in words, such as "vLLM servers", `group` the role's settings group in `[ray]`, and `answers`
    a pending result of each actor.

    Raises:
        UserError: no node had room for one of them.
    """
    if not answers:
        return
    _, missing = connect().wait(list(answers), num_returns=len(answers), timeout=timeout)
    if missing:
        raise UserError(
            f"no node had room for {len(missing)} of {role.count} {what} within {timeout:g} s (ray.timeout); "
            f"each needs {needs(role)} (ray.{group})"
        )


def enter(folder: str) -> None:
    """Make a folder the working directory of this process; raise a UserError if this node does not have it."""
    try:
        os.chdir(folder)
    except OSError as error:
        node = connect().util.get_node_ip_address()
        raise UserError(
            f"{folder}: {error.strerror} on node {node}; put the working directory, the data and the run's folder on "
            "storage that all nodes share"
        ) from error


def result(answer: Any) -> Any:
    """Wait for the result of a call to an actor, and return it; a UserError of the actor is raised unchanged."""
    from ray.exceptions import RayTaskError

    try:
        return connect().get(answer)
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        raise
