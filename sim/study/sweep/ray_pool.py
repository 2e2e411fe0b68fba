"""Runs a function over tasks on a Ray cluster that is there already; the counterpart of `batchsim.study.sweep.pool`.

Nothing is shared with the nodes but what travels with a task and comes back: they need the same batchsim and the same
packages, which every task checks, and no disk of ours.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from batchsim.base.errors import BatchsimError, ScenarioError
from batchsim.results.provenance import code_hash, packages
from batchsim.study.sweep.pool import Killed

T = TypeVar("T")
R = TypeVar("R")

AUTO = "auto"
"""The cluster that RAY_ADDRESS names, or the one whose node this machine is."""

_AHEAD = 2  # tasks handed out per CPU of the cluster, so that none waits for us
_REACH_S = 5.0


def run_on_ray(function: Callable[[T], R], tasks: Sequence[T], address: str) -> Iterator[tuple[int, R | Killed]]:
    """Yields (index of the task, result) as tasks end, from the cluster at `address`; a task takes one of its CPUs.

    A task whose worker dies runs once more, then is Killed. What `function` raises ends everything and is raised here.
    ScenarioError if there is no Ray, no cluster at the address, or a node with another batchsim.
    """
    ray, ours = _connect(address)
    run_there = ray.remote(num_cpus=1, max_retries=1)(_run_there)
    made_with = _made_with()
    waiting, running = deque(enumerate(tasks)), {}
    try:
        room = _AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        while waiting or running:
            while waiting and len(running) < room:
                number, task = waiting.popleft()
                running[run_there.remote(function, task, made_with)] = number
            for done in ray.wait(list(running), num_returns=1)[0]:
                yield running.pop(done), _result(ray, done)
    finally:
        for task in running:
            ray.cancel(task, force=True)
        if ours:
            ray.shutdown()


def _run_there(function: Callable[[Any], Any], task: Any, made_with: dict[str, str]) -> Any:
    """On a node: the result of a task, if the node would have made what this machine would."""
    other = {name: have for name, have in _made_with().items() if have != made_with[name]}
    if other:
        differing = ", ".join(f"{name} {have}, here {made_with[name]}" for name, have in other.items())
        raise ScenarioError(
            f"--executor ray: node {socket.gethostname()} has {differing}. Install the same on every node."
        )
    return function(task)


def _made_with() -> dict[str, str]:
    return packages() | {"batchsim's code": code_hash()}


def _connect(address: str) -> tuple[Any, bool]:
    """(Ray, connected; whether this call connected it)."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ScenarioError(
            "--executor ray: needs ray, which is not installed. pip install 'batchsim[ray]', here and on every node."
        ) from None
    if ray.is_initialized():
        return ray, False
    target = os.environ.get("RAY_ADDRESS", AUTO) if address == AUTO else address
    _check_reachable(target)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address=target, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, ImportError) as error:
        said = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
        raise ScenarioError(
            f"--executor ray: no cluster at {target}: {said}. Start one with `ray start --head`, or give its --address."
        ) from None
    return ray, True


def _check_reachable(target: str) -> None:
    """ScenarioError if no process listens at `host:port`: Ray itself would try for a minute and end the process."""
    host, colon, port = target.removeprefix("ray://").rpartition(":")
    if not colon:
        if target != AUTO:
            raise ScenarioError(f"--address {target}: is no address. Write host:port, ray://host:port or auto.")
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ScenarioError(
            f"--executor ray: nobody answers at {target}: {getattr(error, 'strerror', None) or error}. Start a cluster"
            " with `ray start --head`, or give its --address."
        ) from None


def _result(ray: Any, task: Any) -> Any:
    errors = ray.exceptions
    try:
        return ray.get(task)
    except errors.RayTaskError as error:
        if isinstance(error.cause, BatchsimError):
            raise error.cause from None
        raise BatchsimError(
            f"--executor ray: a node cannot run a point: {_last_line(error)}. Is the same batchsim installed there?"
        ) from None
    except (errors.WorkerCrashedError, errors.OutOfMemoryError, errors.NodeDiedError, errors.ObjectLostError) as error:
        return Killed(f"died on its node, and so did another ({type(error).__name__})")
    except errors.RayError as error:
        raise BatchsimError(f"--executor ray: {_last_line(error)}. Points that were done are kept.") from None


def _last_line(error: Exception) -> str:
    return str(error).strip().split("\n")[-1].rstrip(".")
