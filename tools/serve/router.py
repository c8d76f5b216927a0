"""Prefix-aware routing of requests to data parallel replicas."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from graft.models.cache.prefix import page_keys
from graft.tools.serve.engine_driver import EngineInfo


class Router:
    """Chooses the replica with the longest cached prefix of a prompt; of several, the least loaded.

    The router estimates the contents of the replicas' prefix caches instead of querying them. For
    each replica, it stores the page keys of the prompts that were routed to the replica. It stores
    at most as many keys as the cache has pages and evicts the least recently used ones. A replica
    is not chosen if it has at least ``max_batch_size`` requests more than the replica with the
    fewest requests. `info` has the properties of the engines, which are equal in all replicas.
    """

    def __init__(self, count: int, info: EngineInfo):
        self._info = info
        self._cached: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(count)]

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the prefix-cache keys of a prompt, one for each page that can be reused.

        A page can be reused if it is full and does not contain the last token, which the engine
        always computes. A prompt with invalid tokens has no keys. Any replica can refuse it.
        """
        try:
            return page_keys(tokens, self._info.page_size)
        except (TypeError, ValueError, OverflowError):
            return []

    def choose(self, keys: Sequence[bytes], loads: Mapping[int, int]) -> int:
        """Return the replica for a prompt, and record that the replica caches the prompt's pages.

        `keys` are the prefix-cache keys of the prompt. `loads` are the numbers of requests of the
        replicas that can be chosen.
        """
        max_load = min(loads.values()) + self._info.max_batch_size
        candidates = [replica for replica, load in loads.items() if load < max_load]

        def rank(replica: int) -> tuple[int, int]:
            hits = 0
            for key in keys:
                if key not in self._cached[replica]:
                    break
                hits += 1
            return -hits, loads[replica]

        chosen = min(candidates, key=rank)
        cached = self._cached[chosen]
        for key in reversed(keys):  # reversed, so that the first page of the prompt is evicted last
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > self._info.pages:
            cached.popitem(last=False)
        return chosen

    def forget(self, replica: int) -> None:
        """Delete the stored keys of a replica that died. Its cache is empty after the restart."""
        self._cached[replica].clear()
