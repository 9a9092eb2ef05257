"""A Ray cluster on this machine, for a module of tests."""

from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster whose head has no resources; tests add the nodes that they kill."""
    from ray.cluster_utils import Cluster
    from ray_helpers import start

    cluster = Cluster()
    start(cluster, include_dashboard=False)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def add(cluster: Any) -> Iterator[Callable[..., Any]]:
    """Add nodes with resources, which are removed after the test if they have not been killed."""
    from ray_helpers import all_ended, start

    nodes = []

    def add(**resources: int) -> Any:
        nodes.append(start(cluster, resources=resources))
        return nodes[-1]

    yield add
    for child in psutil.Process().children():  # the command of a test that has failed
        if "cavesson" in child.cmdline():
            child.kill()
    for node in nodes:
        if node in cluster.list_all_nodes():
            cluster.remove_node(node)
    all_ended()
