"""Ray: processes of a machine, an engine in each."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from graft.cudagraph import chooser
from graft.cudagraph.errors import OptionError
from graft.tools.serve.replicas import Actor, Worker

#: Calls of a worker that are under way at once, at most.
_AT_ONCE = 16


class RayActor:
    """A `Worker` as an actor of Ray."""

    def __init__(self, ray: Any, kind: Any):
        self._ray, self._handle = ray, kind.remote()

    def call(self, name: str, *given: Any) -> Awaitable[Any]:
        answer: Awaitable[Any] = getattr(self._handle, name).remote(*given)
        return answer

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
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token",
                   "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise OptionError(
            "--replicas needs the package ray: pip install 'graft-cuda[replicas]'") from error
    device = os.environ.get("GRAFT_DEVICE") or "auto"
    gpus = int(device == "cuda" or (device == "auto" and not chooser.probe_cuda()[1]))
    with tempfile.TemporaryDirectory(prefix="graft-", ignore_cleanup_errors=True) as folder:
        ray.init(address="local", include_dashboard=False, num_cpus=count, _temp_dir=folder,
                 logging_level=logging.ERROR, log_to_driver=False, configure_logging=False,
                 _system_config={"worker_niceness": 0})  # 15 of itself
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
