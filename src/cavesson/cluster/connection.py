"""The connection of a process of a run to the Ray cluster that runs it."""

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from cavesson.algorithms.settings import RoleSettings
from cavesson.command_line import ON_RAY
from cavesson.errors import UserError, first_line


def is_on_ray() -> bool:
    """Return whether this process belongs to a run on a Ray cluster."""
    return ON_RAY in os.environ


def connect(address: str = "auto") -> Any:
    """Connect this process to the cluster of its run, unless it is connected, and return the module `ray`.

    The processes of a run see the same named actors, as ON_RAY has the same value in all of them.

    Args:
        address: of the cluster; "auto" = that of the variable RAY_ADDRESS, or that which this machine belongs to.

    Raises:
        UserError: Ray is not installed, or there is no cluster.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # it would copy the working directory to all nodes
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError("--ray needs Ray; install it with: pip install 'cavesson[ray]'") from None
    if not ray.is_initialized():
        # Of a node that dies, it would print pages of logs; what dies is said in one line by the run itself.
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
        try:
            ray.init(address, namespace=os.environ[ON_RAY], log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(
                f"ray.address {address!r}: there is no Ray cluster ({first_line(error)}); "
                "start one with ray start --head, or name another"
            ) from error
    return ray


def options(role: RoleSettings) -> dict[str, Any]:
    """Return the resources of each process of a role, as Ray's options of an actor."""
    return {"num_cpus": role.cpus, "num_gpus": role.gpus, "resources": dict(role.resources)}


def needs(role: RoleSettings) -> str:
    """Return the resources of each process of a role, for messages."""
    amounts = {"CPU": role.cpus, "GPU": role.gpus, **role.resources}
    return ", ".join(f"{name} {amount:g}" for name, amount in amounts.items() if amount) or "resources"


def actor_name(role: str, number: int) -> str:
    """Return the name of an actor of a run."""
    return f"{role}-{number}"


def actors(role: str, count: int) -> list[Any]:
    """Return the actors of a role that have not died for good."""
    ray, found = connect(), []
    for number in range(count):
        with suppress(ValueError):  # there is none of this name any more
            found.append(ray.get_actor(actor_name(role, number)))
    return found


def check_placed(what: str, group: str, role: RoleSettings, answers: Sequence[Any], timeout: float) -> None:
    """Wait until all actors of a role have been started; those that have died since count as started.

    Args:
        what: the actors, for the message.
        group: name of their settings.
        role: their settings.
        answers: something that each of them answers.
        timeout: seconds that they may take.

    Raises:
        UserError: no node has the resources for one of them.
    """
    if not answers:
        return
    _, missing = connect().wait(list(answers), num_returns=len(answers), timeout=timeout)
    if missing:
        raise UserError(
            f"{len(missing)} of {role.count} {what} found no node with free {needs(role)} within {timeout:g} s "
            f"(ray.timeout); ray.{group} says what each needs"
        )


def enter(folder: str) -> None:
    """Make a folder the working directory of this process.

    Raises:
        UserError: this node does not have it.
    """
    try:
        os.chdir(folder)
    except OSError as error:
        node = connect().util.get_node_ip_address()
        raise UserError(
            f"{folder}: {error.strerror} on node {node}; a run on a Ray cluster needs its working directory, its data "
            "and its folder on storage that all nodes share"
        ) from error


def result(answer: Any) -> Any:
    """Wait for the answer of an actor; an error that a user can fix is raised as it was there."""
    from ray.exceptions import RayTaskError

    try:
        return connect().get(answer)
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        raise
