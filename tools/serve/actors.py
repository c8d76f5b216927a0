"""Ray actors for data parallel serving: each actor is a process that runs one engine."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from graft.cudagraph import chooser
from graft.cudagraph.errors import OptionError
from graft.models.engine.engine import Engine
from graft.models.errors import EngineError
from graft.models.request import Event, Request
from graft.tools.serve.engine_driver import EngineDriver, EngineInfo, get_all
from graft.tools.serve.replicas import Actor

#: Maximum number of concurrent method calls of an actor.
_MAX_CONCURRENCY = 16
#: Bytes of Ray's object store. Messages are small.
_OBJECT_STORE_BYTES = 1 << 27


class ReplicaActor:
    """An engine and the `EngineDriver` that runs it.

    Ray calls the methods in the event loop of the actor's process.
    """

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._driver: EngineDriver

    async def start(self, make_engine: Callable[[], Engine]) -> EngineInfo:
        """Create the engine, start its driver and return the engine's properties.

        If `make_engine` raises an error, this method raises it too.
        """
        self._driver = EngineDriver(make_engine())
        self._driver.start(lambda _output: None)
        return self._driver.info

    async def send(self, jobs: Sequence[Request | str]) -> None:
        """Process jobs in the given order.

        A job is a `Request` to submit, or the id of a request to cancel.
        """
        for job in jobs:
            if isinstance(job, str):
                self._driver.cancel(job)
            else:
                self._driver.submit(job, self._events)

    async def receive(self) -> list[Event]:
        """Wait until at least one event is available, and return all available events.

        Raises
        ------
        EngineError
            If the engine has failed.
        """
        events = await get_all(self._events)
        if self._driver.failure is not None:
            raise EngineError(self._driver.failure)
        return events

    async def counters(self) -> dict[str, Any] | None:
        """Return `Engine.counters`, or None if the engine does not answer."""
        return (await self._driver.counters())[0]


class RayActor:
    """Handle of a `ReplicaActor` in a Ray process.

    Parameters
    ----------
    ray
        The module ``ray``.
    actor_class
        `ReplicaActor` as a remote class.
    """

    def __init__(self, ray: Any, actor_class: Any):
        self._ray = ray
        self._handle = actor_class.remote()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor and return its result.

        If the method raises an error, the error is raised in this process too.
        """
        try:
            return await getattr(self._handle, method).remote(*arguments)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def kill(self) -> None:
        """Terminate the process of the actor."""
        self._ray.kill(self._handle)


@contextmanager
def ray_cluster(count: int) -> Iterator[Callable[[], Actor]]:
    """Run a local Ray cluster for `count` replicas and yield a function that launches an actor.

    Clients of the cluster need a random token that only this process and its replicas know. Ray's
    usage statistics are disabled. When the context ends, the cluster is shut down and its files
    are deleted.

    Raises
    ------
    OptionError
        If the extra ``replicas`` is not installed, or there are fewer GPUs than replicas.
    EngineError
        If Ray does not start.
    """
    ray = _import_ray()
    device = os.environ.get("GRAFT_DEVICE") or "auto"
    uses_cuda = device == "cuda"
    if device == "auto":
        _, error = chooser.probe_cuda()
        uses_cuda = not error
    gpus_per_replica = int(uses_cuda)
    with tempfile.TemporaryDirectory(prefix="graft-", ignore_cleanup_errors=True) as folder:
        _start_ray(ray, count, folder)
        # Ray has installed a SIGTERM handler that would exit at once. Replace it, so that the
        # server can complete its running requests.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            gpus = ray.cluster_resources().get("GPU", 0)
            if gpus < gpus_per_replica * count:
                raise OptionError(
                    f"--replicas {count}: each replica needs a GPU, and there are {gpus:g}"
                )
            remote = ray.remote(
                num_cpus=1, num_gpus=gpus_per_replica, max_concurrency=_MAX_CONCURRENCY
            )
            actor_class = remote(ReplicaActor)
            yield lambda: RayActor(ray, actor_class)
        finally:
            ray.shutdown()


def _import_ray() -> Any:
    """Import Ray. Before that, enable its authentication and disable its usage statistics."""
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise OptionError(
            "--replicas needs the package ray: pip install 'graft-cuda[replicas]'"
        ) from error
    return ray


def _start_ray(ray: Any, count: int, folder: str) -> None:
    """Start a local cluster with `count` CPUs, which keeps its files in `folder`."""
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=count,
            _temp_dir=folder,
            object_store_memory=_OBJECT_STORE_BYTES,
            logging_level=logging.ERROR,
            log_to_driver=False,
            configure_logging=False,
            # Ray's default niceness is 15.
            _system_config={"worker_niceness": 0},
        )
    except Exception as error:  # Ray raises errors of various classes here
        ray.shutdown()
        raise EngineError(f"Ray did not start: {error}") from error
