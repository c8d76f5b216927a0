"""Prefix cache: pages of keys and values that outlive their request, found again by their tokens.

A page's key is a chain of hashes over all tokens up to its end, and `lookahead` tokens behind it:
entry i of a draft head depends on token i + 1. Kernels are row-invariant, so a page holds the same
bits whoever wrote it, in prefill or round by round; a grammar has no part in them.

Invariants
----------
1. A page that is kept is never written: whoever holds it has its first position of its own behind
   it (`match` leaves at least one token).
2. What is kept was enqueued before it was kept, on the replays' stream; so whoever finds it reads
   it behind whoever wrote it.
3. A kept page holds one reference of the cache's own; it may be given up while that is the last.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from graft.models.cache.kv import PagedKV

#: A page in each of the caches.
Pages = tuple[int, ...]


class PrefixCache:
    """Which pages hold which tokens, in several paged caches whose pages go together.

    Parameters
    ----------
    caches : of one page size.
    lookahead : tokens behind a page that its entries depend on.
    most : pages that are kept at most.

    Attributes
    ----------
    most : the same.
    hits : tokens that needed no forward.
    evictions : pages given up.
    """

    def __init__(self, caches: Sequence[PagedKV], lookahead: int, most: int) -> None:
        self._caches = caches
        self._lookahead = lookahead
        self.most = most
        self._kept: OrderedDict[bytes, Pages] = OrderedDict()  # least recently used first
        self.hits = self.evictions = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Keys of the pages whose entries `tokens` decide, and behind which a token is left."""
        size = self._caches[0].page_size
        keys = [b""]
        every = np.asarray(tokens if self.most else (), np.int32)
        for end in range(size, len(every) - max(self._lookahead, 1) + 1, size):
            told = every[end - size : end + self._lookahead].tobytes()
            keys.append(hashlib.blake2b(keys[-1] + told, digest_size=32).digest())
        return keys[1:]

    def _found(self, keys: Iterable[bytes]) -> list[bytes]:
        return list(itertools.takewhile(self._kept.__contains__, keys))

    def count(self, keys: Iterable[bytes]) -> int:
        """How many pages `match` would find."""
        return len(self._found(keys))

    def match(self, keys: Iterable[bytes]) -> list[Pages]:
        """Pages of the longest prefix that is kept; they are the last to be given up."""
        found = self._found(keys)
        for key in reversed(found):  # the beginning last: without it the rest is not found
            self._kept.move_to_end(key)
        return [self._kept[key] for key in found]

    def keep(self, slot: int, tokens: Sequence[int]) -> None:
        """Keep the pages of a slot whose entries for `tokens`, all but the last, are enqueued; in
        drafters' caches too."""
        if self.most == 0:
            return
        owned = zip(*(cache.pages_of(slot) for cache in self._caches), strict=True)
        keys = list(zip(self.keys(tokens), owned, strict=False))
        self._keep(keys[: self.most])

    def adopt(
        self, keys: Sequence[bytes], write: Callable[[list[Pages], list[int]], object]
    ) -> None:
        """Keep pages that another engine wrote, as many of the first as there is room for.

        Parameters
        ----------
        write : enqueues what stands in them, given pages and which of the keys they are for.
        """
        found = self.match(keys)
        self.make_room(len(keys) - len(found), found)
        free = zip(*(reversed(cache.free) for cache in self._caches), strict=False)
        missing = [i for i, key in enumerate(keys) if key not in self._kept]
        if pages := dict(zip(missing, free, strict=False)):
            write(list(pages.values()), list(pages))
            for cache in self._caches:
                del cache.free[-len(pages) :]
            self._keep([(keys[i], held) for i, held in pages.items()])

    def _keep(self, pages: Sequence[tuple[bytes, Pages]]) -> None:
        """Hold pages by their keys, the first longest, and no more than there may be."""
        for key, held in reversed(pages):
            if key not in self._kept:
                for cache, page in zip(self._caches, held, strict=True):
                    cache.hold(page)
                self._kept[key] = held
            self._kept.move_to_end(key)
        self._give_up(list(itertools.islice(self._kept, max(0, len(self._kept) - self.most))))

    def make_room(self, pages: int, stay: Collection[Pages]) -> None:
        """Give up pages that nobody uses until so many are free, least recently used first; none
        where that would not do, and none of those that are to stay."""
        count = pages - min(len(cache.free) for cache in self._caches)
        staying = set(stay)
        used = list[bytes]()
        unused = list[bytes]()
        for key, held in self._kept.items():
            if len(unused) >= count:
                break
            (used if self._in_use(held) or held in staying else unused).append(key)
        for key in used:  # nobody meets them again soon
            self._kept.move_to_end(key)
        if len(unused) >= count:
            self._give_up(unused)

    @property
    def unused(self) -> int:
        """Kept pages that no slot has."""
        return sum(not self._in_use(pages) for pages in self._kept.values())

    def _in_use(self, pages: Pages) -> bool:
        return self._caches[0].references(pages[0]) > 1

    def clear(self) -> None:
        """Give up everything."""
        self._give_up(list(self._kept))

    def _give_up(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            for cache, page in zip(self._caches, self._kept.pop(key), strict=True):
                cache.drop(page)
            self.evictions += 1
