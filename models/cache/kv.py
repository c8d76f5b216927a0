"""Paged KV cache: device pages, the page table that kernels read, and the host's page allocator.

A *slot* is the index of a running request on the device. Row ``s`` of the page table lists the
pages of slot ``s`` in the order of their positions.

Pages are reference-counted: each page has a number of slots that use it. The prefix cache can also
retain a page. A page becomes free when no slot uses it and the prefix cache does not retain it. A
retained page that no slot uses is *idle*.

Rejected drafts need no cleanup on the device. Keys and values are addressed by position, so the
next token at the same position overwrites those of a rejected draft.

Invariants
----------
1. `PagedKV.allocate` only appends entries to a slot's row of the page table. It never changes
   existing entries.
2. `PagedKV.release` may be called only when no launched work reads the slot's positions any more.
3. `PagedKV.set_table` copies a row from pinned memory. Because of 1 and 2, the host may extend this
   row while an older copy of it is pending. The pending copy then also transfers the new entries.
   This is harmless, because they are pages of the same request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from graft.cudagraph.device import Device
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane

#: Storage dtypes of weights and caches, each with the name of its type in kernels.
STORAGE = {"float32": "float", "float16": "fp16_t", "bfloat16": "bf16_t"}


class PagedKV:
    """Keys and values of every layer in pages of `page_size` positions.

    Parameters
    ----------
    pages
        Number of pages for all slots together. One more page, the scratch page, is added. Unused
        entries of the page table refer to the scratch page, which is never written.
    page_size
        Positions per page, a power of two.
    dtype
        ``"float32"``, ``"float16"`` or ``"bfloat16"``.
    slots, max_pages_per_slot
        Number of rows and columns of the page table. A slot has at most ``max_pages_per_slot *
        page_size`` positions.

    Attributes
    ----------
    k, v
        Arrays of shape [layers, pages + 1, page_size, kv_heads, head_dim].
    page_table
        int32[slots, max_pages_per_slot]. Unallocated entries refer to the scratch page.
    scratch_page
        Index of the scratch page. It equals the parameter `pages`.
    free
        Free pages, used as a stack: the last one is allocated first.
    idle
        Idle pages (retained by the prefix cache, but not used by a slot) as the keys of an ordered
        dictionary, least recently used first.
    idle_version
        Number that changes whenever the set of idle pages changes.
    """

    def __init__(
        self,
        device: Device,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        slots: int,
        max_pages_per_slot: int,
    ) -> None:
        sizes = {
            "layers": layers,
            "pages": pages,
            "page_size": page_size,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "slots": slots,
            "max_pages_per_slot": max_pages_per_slot,
        }
        for name, value in sizes.items():
            if value < 1:
                raise OptionError(f"PagedKV: {name} is {value}, must be at least 1")
        if page_size & (page_size - 1):
            raise OptionError(f"PagedKV: page_size is {page_size}, must be a power of two")
        if dtype not in STORAGE:
            raise OptionError(f"PagedKV: dtype is {dtype!r}, must be one of {sorted(STORAGE)}")
        self.device = device
        self.layers = layers
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.page_size = page_size
        self.dtype = dtype
        self.slots = slots
        self.max_pages = max_pages_per_slot
        self.scratch_page = pages
        self.page_shift = page_size.bit_length() - 1
        shape = (layers, pages + 1, page_size, kv_heads, head_dim)
        self.k: DeviceArray = device.zeros(shape, dtype)
        self.v: DeviceArray = device.zeros(shape, dtype)
        empty = np.full((slots, self.max_pages), self.scratch_page, dtype=np.int32)
        self.page_table: DeviceArray = device.from_host(empty)
        self.free = list(range(pages - 1, -1, -1))
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.idle_version = 0
        self._num_slots = [0] * pages
        self._retained = bytearray(pages)
        self._owned: list[list[int]] = [[] for _ in range(slots)]
        self._staged = []  # rows of the page table in pinned memory
        for _ in range(slots):
            row = device.pinned((self.max_pages,), "int32")
            row.array[:] = self.scratch_page
            self._staged.append(row)

    @property
    def positions(self) -> int:
        """Maximum number of positions of a slot."""
        return self.max_pages * self.page_size

    @property
    def page_bytes(self) -> int:
        """Size of a page in bytes: keys and values of all layers."""
        num_pages = self.scratch_page + 1
        return 2 * self.k.nbytes // num_pages

    def pages_of(self, slot: int) -> tuple[int, ...]:
        """Return the pages of a slot in the order of their positions."""
        return tuple(self._owned[self._checked(slot)])

    def allocate(self, slot: int, positions: int, shared: Sequence[int] = ()) -> bool:
        """Allocate pages until a slot has pages for its first `positions` positions.

        If the slot has no pages yet, its first pages are `shared`, which are pages that the prefix
        cache retains. Return False, with nothing changed, if there are too few free pages or the
        slot's row of the page table is too short.
        """
        owned = self._owned[self._checked(slot)]
        total = -(-positions // self.page_size)
        if total <= len(owned):
            return True
        if total > self.max_pages:
            return False
        num_new = total - len(owned) - len(shared)
        if num_new > len(self.free):
            return False
        pages = list(shared)
        for _ in range(num_new):
            pages.append(self.free.pop())
        for page in pages:
            self._num_slots[page] += 1
        for page in shared:
            self._remove_idle(page)
        self._staged[slot].array[len(owned) : total] = pages
        owned.extend(pages)
        return True

    def release(self, slot: int) -> None:
        """Remove all pages from a slot.

        Pages of later positions become idle first, so that the prefix cache evicts them first.
        """
        owned = self._owned[self._checked(slot)]
        self._staged[slot].array[: len(owned)] = self.scratch_page
        for page in reversed(owned):
            self._num_slots[page] -= 1
            self._update_idle_or_free(page)
        owned.clear()

    def retain(self, page: int) -> None:
        """Retain a page: it does not become free when no slot uses it.

        A slot must use the page, or the caller must have removed the page from `free`.
        """
        self._retained[page] = True
        self._update_idle_or_free(page)

    def drop(self, page: int) -> None:
        """Stop retaining a page. The page becomes free if no slot uses it."""
        self._retained[page] = False
        self._remove_idle(page)
        self._update_idle_or_free(page)

    def _remove_idle(self, page: int) -> None:
        if page in self.idle:
            del self.idle[page]
            self.idle_version += 1

    def _update_idle_or_free(self, page: int) -> None:
        """Make a page that no slot uses idle if the prefix cache retains it, and free otherwise."""
        if self._num_slots[page]:
            return
        if self._retained[page]:
            self.idle[page] = None
            self.idle_version += 1
        else:
            self.free.append(page)

    def set_table(self, lane: Lane, slot: int) -> None:
        """Enqueue a copy of a slot's row of the page table from pinned memory to the device."""
        row = self.page_table[self._checked(slot)]
        staged = self._staged[slot]
        lane.copy(row, staged, name="page table")

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise OptionError(f"PagedKV: slot {slot} is outside 0..{self.slots - 1}")
        return slot
