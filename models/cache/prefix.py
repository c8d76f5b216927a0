"""Prefix cache: keeps the KV-cache pages of finished requests for requests with the same prefix.

The key of a page is a hash chain over all tokens up to the end of the page and over `lookahead`
tokens after it. These tokens are included because entry ``i`` in the KV cache of a draft head
depends on token ``i + 1``.

The contents of a page depend only on the tokens of its key. Kernels are row-invariant, so prefill
and decoding rounds write the same bits into the page, whatever the batch. Grammars do not affect
the contents.

Invariants
----------
1. A cached page is never written. A request that shares cached pages writes only later positions.
   There is at least one such position, because the page of a request's last token is never taken
   from the cache.
2. A page is cached only after its writes have been enqueued on the stream of the rounds. Work that
   reads the cached page is enqueued on the same stream later, so it runs after the writes.
3. The prefix cache retains its pages (`PagedKV.retain`). To make pages free, it evicts idle pages,
   which no slot uses.
4. A page is idle in all KV caches or in none. Pages are evicted in the order in which `idle` of the
   first KV cache lists them. No operation except `clear` visits all cached pages.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from graft.models.cache.kv import PagedKV

__all__ = ["PageGroup", "PrefixCache", "page_keys"]

#: One page index for each KV cache (target and drafter), all for the same token positions.
PageGroup = tuple[int, ...]


def page_keys(tokens: Sequence[int], page_size: int, lookahead: int = 0) -> list[bytes]:
    """Return a key of 32 bytes for each full page of a token sequence.

    A key depends on all tokens up to the end of its page and on `lookahead` tokens after it, which
    also affect the page's KV-cache entries. A page that contains the last token is excluded,
    because a request must process at least one token to get the logits of the next one.
    """
    array = np.asarray(tokens, np.int32)
    last_end = len(array) - max(lookahead, 1)
    key = b""
    keys = []
    for end in range(page_size, last_end + 1, page_size):
        begin = end - page_size
        content = array[begin : end + lookahead].tobytes()
        digest = hashlib.blake2b(key + content, digest_size=32)
        key = digest.digest()
        keys.append(key)
    return keys


class PrefixCache:
    """Maps token prefixes to pages of several paged KV caches.

    A cached page is a `PageGroup`: one page in each of the caches, for the same positions. The
    caches of target and drafter have the same page size. At most `max_pages` pages are cached; 0
    disables the prefix cache. `lookahead` is as in `page_keys`.

    `hit_tokens` counts the tokens that were not prefilled because their pages were cached, and
    `evictions` counts the evicted pages.
    """

    def __init__(self, caches: Sequence[PagedKV], lookahead: int, max_pages: int) -> None:
        self._caches = caches
        self._lookahead = lookahead
        self.max_pages = max_pages
        self._cached: OrderedDict[bytes, PageGroup] = OrderedDict()  # least recently used first
        self._key_by_page: dict[int, bytes] = {}  # keys by page number in the first KV cache
        self.hit_tokens = 0
        self.evictions = 0
        self._changes = 0  # number of insertions and evictions of pages

    def __len__(self) -> int:
        return len(self._cached)

    @property
    def num_unused(self) -> int:
        """Number of cached pages that no slot uses."""
        return len(self._caches[0].idle)

    @property
    def version(self) -> tuple[int, int]:
        """A value that changes when a page is cached or evicted, or becomes used or unused.

        A cached page is unused while it belongs to no slot.
        """
        return self._changes, self._caches[0].idle_version

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the keys of the full pages of `tokens`, or none if the cache is disabled."""
        if not self.max_pages:
            return []
        return page_keys(tokens, self._caches[0].page_size, self._lookahead)

    def count_hits(self, keys: Iterable[bytes]) -> tuple[int, int]:
        """Return how many pages `match` would find, and how many of these pages no slot uses."""
        found = self._find(keys)
        idle = self._caches[0].idle
        return len(found), sum(self._cached[key][0] in idle for key in found)

    def match(self, keys: Iterable[bytes]) -> list[PageGroup]:
        """Return the pages of the longest cached prefix and mark them as recently used."""
        found = self._find(keys)
        # The first page becomes the most recently used page and is evicted last, because the pages
        # after it cannot be found without it.
        for key in reversed(found):
            self._mark_used(key)
        return [self._cached[key] for key in found]

    def insert(self, slot: int, tokens: Sequence[int]) -> None:
        """Add the full pages of a slot to the cache. `tokens` are the tokens of the slot's request.

        The caller must already have enqueued the work that writes the KV-cache entries of all these
        tokens except the last one.
        """
        if self.max_pages == 0:
            return
        pages_by_cache = [cache.pages_of(slot) for cache in self._caches]
        groups = zip(*pages_by_cache, strict=True)
        keys = self.keys(tokens)[: self.max_pages]
        pages = list(zip(keys, groups, strict=False))
        self._insert(pages)

    def insert_migrated(
        self, keys: Sequence[bytes], write: Callable[[list[PageGroup], list[int]], object]
    ) -> None:
        """Add the pages of a migrated request to the cache. `keys` are their keys in order.

        Unused pages are evicted to make free pages for them. If there are still too few free pages,
        only the first of the migrated pages are cached.

        The method calls ``write(free_pages, indices)``, which must enqueue the copies of the page
        contents: the contents that belong to ``keys[indices[i]]`` are copied to ``free_pages[i]``.
        """
        found = self.match(keys)
        num_missing = len(keys) - len(found)
        self.evict_until_free(num_missing, found)
        missing = [i for i, key in enumerate(keys) if key not in self._cached]
        num_free = min(len(cache.free) for cache in self._caches)
        indices = missing[:num_free]
        if not indices:
            return
        groups = self._next_free_pages(len(indices))
        write(groups, indices)
        for cache in self._caches:
            del cache.free[-len(groups) :]
        pages = []
        for i, group in zip(indices, groups, strict=True):
            pages.append((keys[i], group))
        self._insert(pages)

    def _next_free_pages(self, count: int) -> list[PageGroup]:
        """Return the next `count` page groups that would be allocated. Their pages remain free."""
        pages_by_cache = []
        for cache in self._caches:
            pages = cache.free[-count:]
            pages.reverse()  # the last free page is allocated first
            pages_by_cache.append(pages)
        return list(zip(*pages_by_cache, strict=True))

    def evict_until_free(self, pages: int, keep: Collection[PageGroup]) -> None:
        """Evict unused pages, least recently used first, until each cache has `pages` free pages.

        Pages in `keep` are not evicted. If evicting all other unused pages would not suffice, no
        page is evicted.
        """
        num_free = min(len(cache.free) for cache in self._caches)
        num_evictions = pages - num_free
        if num_evictions <= 0:
            return
        idle = self._caches[0].idle
        kept = {group[0] for group in keep if group[0] in idle}
        if num_evictions > len(idle) - len(kept):
            return
        candidates = (page for page in idle if page not in kept)
        evicted = list(itertools.islice(candidates, num_evictions))
        self._evict([self._key_by_page[page] for page in evicted])

    def clear(self) -> None:
        """Evict all pages."""
        self._evict(list(self._cached))

    def _find(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys of the longest cached prefix."""
        found = []
        for key in keys:
            if key not in self._cached:
                break
            found.append(key)
        return found

    def _insert(self, pages: Sequence[tuple[bytes, PageGroup]]) -> None:
        """Add pages to the cache, and evict the least recently used ones if there are too many.

        The first page becomes the most recently used one, because the others cannot be found
        without it.
        """
        for key, group in reversed(pages):
            if key not in self._cached:
                for cache, page in zip(self._caches, group, strict=True):
                    cache.retain(page)
                self._cached[key] = group
                self._changes += 1
                self._key_by_page[group[0]] = key
            self._mark_used(key)
        surplus = max(0, len(self._cached) - self.max_pages)
        oldest = itertools.islice(self._cached, surplus)
        self._evict(list(oldest))

    def _mark_used(self, key: bytes) -> None:
        self._cached.move_to_end(key)
        first_page = self._cached[key][0]
        idle = self._caches[0].idle
        if first_page in idle:
            idle.move_to_end(first_page)

    def _evict(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            group = self._cached.pop(key)
            del self._key_by_page[group[0]]
            for cache, page in zip(self._caches, group, strict=True):
                cache.drop(page)
            self.evictions += 1
            self._changes += 1
