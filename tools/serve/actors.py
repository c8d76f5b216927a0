"""Ray actors for data parallel serving: each actor is a process that runs one engine."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from graft.cudagraph.driver import chooser
from graft.cudagraph.errors import OptionError
from graft.models.engine.engine import Engine
from graft.models.errors import EngineError
from graft.models.request import Event, Request
from graft.native.softcuda.scratch import scratch_folder
from graft.tools.serve.engine_driver import EngineDriver, EngineInfo, get_all
from graft.tools.serve.replicas import Actor

#: Maximum number of concurrent method calls of an actor.
_MAX_CONCURRENCY = 16
#: Size of Ray's object store in bytes. It can be small because all messages are small.
_OBJECT_STORE_BYTES = 1 << 27
#: Number of attempts to delete Ray's files, and interval between two attempts in seconds.
_DELETE_ATTEMPTS = 20
_DELETE_INTERVAL_S = 0.1


class ReplicaActor:
    """An engine and the `EngineDriver` that runs it.

    Ray calls the methods in the event loop of the actor's process.
    """

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._driver: EngineDriver

    async def start(self, make_engine: Callable[[], Engine]) -> EngineInfo:
        """Create the engine, start its `EngineDriver` and return the engine's properties.

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
        """Wait for an event, and return all available events.

        If the engine has failed, raise EngineError.
        """
        events = await get_all(self._events)
        if self._driver.failure is not None:
            raise EngineError(self._driver.failure)
        return events

    async def counters(self) -> dict[str, Any] | None:
        """Return the result of `Engine.counters`, or None if the engine does not answer."""
        return (await self._driver.counters())[0]


class RayActor:
    """Handle of a `ReplicaActor` in a Ray process.

    `actor_class` is the remote class of `ReplicaActor`.
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

    The processes of the cluster listen on 127.0.0.1 only. Their clients need a random token that
    only this process and its replicas know. Ray's usage statistics are disabled. When the context
    ends, the cluster is shut down and its files are deleted.

    Raise OptionError if the extra ``replicas`` is not installed or there are fewer GPUs than
    replicas. Raise EngineError if Ray does not start.
    """
    ray = _import_ray()
    device = os.environ.get("GRAFT_DEVICE") or "auto"
    uses_cuda = device == "cuda"
    if device == "auto":
        _, error = chooser.probe_cuda()
        uses_cuda = not error
    gpus_per_replica = int(uses_cuda)
    with private_folder() as folder:
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


@contextmanager
def private_folder() -> Iterator[str]:
    """Create a folder for Ray's files, private to this user; delete it when the context ends."""
    with scratch_folder("graft-ray-") as parent:  # mode 0700; Ray sets the mode of `folder` to 0777
        folder = parent / "ray"
        folder.mkdir()
        try:
            yield str(folder)
        finally:
            # Ray's processes may still write files here, so the deletion is repeated.
            for _ in range(_DELETE_ATTEMPTS):
                shutil.rmtree(folder, ignore_errors=True)
                if not folder.exists():
                    break
                time.sleep(_DELETE_INTERVAL_S)


def _import_ray() -> Any:
    """Set the environment variables that Ray reads when it is imported, and import Ray."""
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # This variable makes Ray listen on 127.0.0.1 only, its default on Windows and macOS.
        # Without it, Ray listens on all addresses, and its monitor serves metrics without a token.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise OptionError("--replicas needs the package ray: pip install ray") from error
    # When an actor dies, Ray prints general advice. `Replicas` logs the death instead.
    worker = sys.modules.get("ray._private.worker")
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None  # type: ignore[union-attr]
    return ray


def _start_ray(ray: Any, count: int, folder: str) -> None:
    """Start a local cluster that has `count` CPUs and stores its files in `folder`."""
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
            # Without this setting, Ray runs the replicas with niceness 15.
            _system_config={"worker_niceness": 0},
        )
    except Exception as error:  # Ray raises errors of various classes here
        ray.shutdown()
        raise EngineError(f"Ray did not start: {error}") from error
