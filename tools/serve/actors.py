"""Engines in processes of their own, over Ray."""

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
from graft.tools.serve.driver import Driver, Facts, all_of
from graft.tools.serve.replicas import Actor

#: Calls of a worker that are under way at once, at most.
_AT_ONCE = 16


class Worker:
    """One engine and its driver, told from afar; the methods are one event loop's."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._driver: Driver

    async def begin(self, make: Callable[[], Engine]) -> Facts:
        """Make the engine. Raises what `make` raises."""
        self._driver = Driver(make())
        self._driver.start(lambda _output: None)
        return self._driver.facts

    async def tell(self, jobs: Sequence[Request | str]) -> None:
        """Take requests, and cancel those that are named."""
        for job in jobs:
            if isinstance(job, str):
                self._driver.cancel(job)
            else:
                self._driver.submit(job, self._events)

    async def events(self) -> list[Event]:
        """What there is to tell, as soon as there is any.

        Raises
        ------
        EngineError
            The engine has failed for good.
        """
        found = await all_of(self._events)
        if self._driver.failure is not None:
            raise EngineError(self._driver.failure)
        return found

    async def counters(self) -> dict[str, Any] | None:
        """The engine's; None: it does not answer."""
        return (await self._driver.counters())[0]


class RayActor:
    """A `Worker` as an actor of Ray."""

    def __init__(self, ray: Any, kind: Any):
        self._ray = ray
        self._handle = kind.remote()

    async def call(self, name: str, *given: Any) -> Any:
        try:
            return await getattr(self._handle, name).remote(*given)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def kill(self) -> None:
        self._ray.kill(self._handle)


@contextmanager
def cluster(count: int) -> Iterator[Callable[[], Actor]]:
    """Ray for so many engines, which ends with the block; what makes an actor.

    It is this process's own: nobody else is let in, nothing is told to anybody, and its files go
    when it does.

    Raises
    ------
    OptionError
        The extra ``replicas`` is not installed, or there are not so many GPUs.
    """
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
    device = os.environ.get("GRAFT_DEVICE") or "auto"
    gpus = int(device == "cuda" or (device == "auto" and not chooser.probe_cuda()[1]))
    with tempfile.TemporaryDirectory(prefix="graft-", ignore_cleanup_errors=True) as folder:
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=count,
                _temp_dir=folder,
                object_store_memory=1 << 27,  # what is told is small
                logging_level=logging.ERROR,
                log_to_driver=False,
                configure_logging=False,
                _system_config={"worker_niceness": 0},
            )  # 15 of itself
        except Exception as error:  # it has no class of its own for this
            ray.shutdown()
            raise EngineError(f"Ray does not come up: {error}") from error
        # Ray's own handler would end the process on the spot.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            found = ray.cluster_resources().get("GPU", 0)
            if found < gpus * count:
                raise OptionError(f"--replicas {count}: each has a GPU, and there are {found:g}")
            worker = ray.remote(num_cpus=1, num_gpus=gpus, max_concurrency=_AT_ONCE)(Worker)
            yield lambda: RayActor(ray, worker)
        finally:
            ray.shutdown()
