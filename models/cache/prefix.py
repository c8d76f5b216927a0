"""Prefix cache: KV-cache pages that outlive their request and are found again by their tokens.

The key of a page is a hash chain over all tokens up to the end of the page and over `lookahead`
tokens after it, because entry ``i`` of a draft head depends on token ``i + 1``. Kernels are
row-invariant, so a page has the same bits whichever request wrote it, in prefill or in a round.
Grammars do not affect the contents of a page.

Invariants
----------
1. A cached page is never written. The first position that a request writes is after the cached
   pages it shares, because `PrefixCache.match` leaves at least one token.
2. The writes of a page were enqueued on the stream of the replays before the page was cached, so
   every reader is ordered after them.
3. The cache owns one reference to each of its pages. A page may be evicted while that is the only
   reference.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from graft.models.cache.kv import PagedKV

__all__ = ["PageGroup", "PrefixCache", "page_keys"]

#: Pages of the same positions, one in each cache.
PageGroup = tuple[int, ...]


def page_keys(tokens: Sequence[int], page_size: int, lookahead: int = 0) -> list[bytes]:
    """Return the keys of the full pages of a token sequence.

    The page of the last token is excluded: a request must process at least one token to get the
    logits of the next one.

    Parameters
    ----------
    tokens
        Token ids.
    page_size
        Positions per page.
    lookahead
        Number of tokens after a page that its entries depend on.

    Returns
    -------
    list of bytes
        One key of 32 bytes per page; each one depends on all tokens before it.
    """
    array = np.asarray(tokens, np.int32)
    last_end = len(array) - max(lookahead, 1)
    key = b""
    keys = []
    for end in range(page_size, last_end + 1, page_size):
        begin = end - page_size
        content = array[begin : end + lookahead].tobytes()
        key = hashlib.blake2b(key + content, digest_size=32).digest()
        keys.append(key)
    return keys


class PrefixCache:
    """Maps token prefixes to KV-cache pages, for several paged caches with common positions.

    Parameters
    ----------
    caches
        Paged caches with the same page size.
    lookahead
        Number of tokens after a page that its entries depend on.
    max_pages
        Maximum number of cached pages; 0 disables the cache.

    Attributes
    ----------
    max_pages
        As given.
    hit_tokens
        Number of tokens whose prefill was saved.
    evictions
        Number of pages evicted.
    """

    def __init__(self, caches: Sequence[PagedKV], lookahead: int, max_pages: int) -> None:
        self._caches = caches
        self._lookahead = lookahead
        self.max_pages = max_pages
        self._cached: OrderedDict[bytes, PageGroup] = OrderedDict()  # least recently used first
        self.hit_tokens = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._cached)

    @property
    def num_unused(self) -> int:
        """Number of cached pages that no slot has."""
        return sum(not self._in_use(group) for group in self._cached.values())

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the keys of the full pages of `tokens`; see `page_keys`."""
        if not self.max_pages:
            return []
        return page_keys(tokens, self._caches[0].page_size, self._lookahead)

    def count_hits(self, keys: Iterable[bytes]) -> int:
        """Return the number of pages that `match` would find."""
        return len(self._find(keys))

    def match(self, keys: Iterable[bytes]) -> list[PageGroup]:
        """Return the pages of the longest cached prefix and mark them as recently used."""
        found = self._find(keys)
        for key in reversed(found):  # the first page last: later ones cannot be found without it
            self._cached.move_to_end(key)
        return [self._cached[key] for key in found]

    def insert(self, slot: int, tokens: Sequence[int]) -> None:
        """Cache the full pages of a slot.

        Parameters
        ----------
        slot
            Slot that has the pages.
        tokens
            Tokens of the slot. Their entries, except for those of the last token, must have been
            enqueued in all caches.
        """
        if self.max_pages == 0:
            return
        pages_by_cache = [cache.pages_of(slot) for cache in self._caches]
        groups = zip(*pages_by_cache, strict=True)
        pages = list(zip(self.keys(tokens), groups, strict=False))
        self._insert(pages[: self.max_pages])

    def insert_migrated(
        self,
        keys: Sequence[bytes],
        write: Callable[[list[PageGroup], list[int]], object],
    ) -> None:
        """Cache pages of another engine, as many of the first ones as pages can be made free.

        Parameters
        ----------
        keys
            Keys of the pages.
        write
            Enqueues the contents of pages. It is called with the pages to write and the index in
            `keys` of each.
        """
        found = self.match(keys)
        self.evict_until_free(len(keys) - len(found), found)
        missing = [i for i, key in enumerate(keys) if key not in self._cached]
        # The last pages of `free` are allocated first.
        free_by_cache = [reversed(cache.free) for cache in self._caches]
        free_groups = zip(*free_by_cache, strict=False)
        groups = dict(zip(missing, free_groups, strict=False))
        if not groups:
            return
        write(list(groups.values()), list(groups))
        for cache in self._caches:
            del cache.free[-len(groups) :]
        pages = [(keys[i], group) for i, group in groups.items()]
        self._insert(pages)

    def evict_until_free(self, pages: int, keep: Collection[PageGroup]) -> None:
        """Evict unused pages, least recently used first, until `pages` pages are free.

        Nothing is evicted if that would not suffice.

        Parameters
        ----------
        pages
            Number of pages that must be free in each cache.
        keep
            Pages that must not be evicted.
        """
        num_free = min(len(cache.free) for cache in self._caches)
        count = pages - num_free
        kept = set(keep)
        in_use: list[bytes] = []
        unused: list[bytes] = []
        for key, group in self._cached.items():
            if len(unused) >= count:
                break
            if self._in_use(group) or group in kept:
                in_use.append(key)
            else:
                unused.append(key)
        for key in in_use:  # so that the next call does not visit them first
            self._cached.move_to_end(key)
        if len(unused) >= count:
            self._evict(unused)

    def clear(self) -> None:
        """Evict all pages."""
        self._evict(list(self._cached))

    def _find(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys of the longest cached prefix."""
        found = itertools.takewhile(self._cached.__contains__, keys)
        return list(found)

    def _insert(self, pages: Sequence[tuple[bytes, PageGroup]]) -> None:
        """Cache pages, the first one as the most recently used, and enforce `max_pages`."""
        for key, group in reversed(pages):
            if key not in self._cached:
                for cache, page in zip(self._caches, group, strict=True):
                    cache.add_reference(page)
                self._cached[key] = group
            self._cached.move_to_end(key)
        surplus = max(0, len(self._cached) - self.max_pages)
        oldest = itertools.islice(self._cached, surplus)
        self._evict(list(oldest))

    def _in_use(self, group: PageGroup) -> bool:
        return self._caches[0].references(group[0]) > 1

    def _evict(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            group = self._cached.pop(key)
            for cache, page in zip(self._caches, group, strict=True):
                cache.drop_reference(page)
            self.evictions += 1
