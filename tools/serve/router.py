"""Prefix-aware routing of requests to data parallel replicas."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import takewhile

from graft.models.cache.prefix import page_keys
from graft.tools.serve.engine_driver import EngineInfo


class Router:
    """Chooses the replica of each request by its longest known prefix, then by load.

    The router keeps a model of the prefix cache of every replica: the keys of the prompts that it
    sent there, least recently used first, as many as the cache has pages. A replica that has a
    whole batch of requests more than the least loaded one is not chosen.

    Parameters
    ----------
    count
        Number of replicas.
    info
        Description of one replica; all replicas are equal.
    """

    def __init__(self, count: int, info: EngineInfo):
        self._info = info
        self._cached: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(count)]

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the prefix-cache keys of a prompt: one for each full page that a token follows.

        Invalid tokens have no keys; any replica will refuse them.
        """
        try:
            return page_keys(tokens, self._info.page_size)
        except (TypeError, ValueError, OverflowError):
            return []

    def choose(self, keys: Sequence[bytes], loads: Mapping[int, int]) -> int:
        """Return the replica for a prompt and remember that it has the prompt's pages.

        Parameters
        ----------
        keys
            Prefix keys of the prompt.
        loads
            Number of requests of each replica that can be chosen.
        """
        lowest = min(loads.values())
        candidates = [
            replica for replica, load in loads.items() if load - lowest < self._info.max_batch_size
        ]

        def rank(replica: int) -> tuple[int, int]:
            cached = self._cached[replica]
            hits = sum(1 for _ in takewhile(cached.__contains__, keys))
            return -hits, loads[replica]

        chosen = min(candidates, key=rank)
        cached = self._cached[chosen]
        for key in reversed(keys):  # the first page of the prompt is evicted last
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > self._info.pages:
            cached.popitem(last=False)
        return chosen

    def forget(self, replica: int) -> None:
        """Forget the pages of a replica that was restarted with an empty cache."""
        self._cached[replica].clear()
