"""Paged key-value cache: device pages, the page table kernels read, and the host's allocator.

A page may be shared: it is free again when the last who holds it drops it.

Rewinding needs no work on the device: keys and values are addressed by position, so a rejected
position is overwritten when it is next fed.

Ownership of a slot's row in the page table
-------------------------------------------
1. `allocate` only appends to a slot's row; entries already there keep their meaning.
2. `release` may be called only when no launched work still reads the slot's positions.
3. Hence the staged row that `set_table` copies may be rewritten while an older copy of the same
   row has not run yet: such a copy then carries newer entries of the same owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graft.cudagraph.device import Device
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray

#: Storage dtypes of weights and caches, and the kernels' name of each.
STORAGE = {"float32": "float", "float16": "fp16_t", "bfloat16": "bf16_t"}


class PagedKV:
    """Keys and values of every layer in pages of `page_size` positions.

    Parameters
    ----------
    layers, kv_heads, head_dim : shape of the model's attention.
    pages : shared by all slots; one more, the scratch page, is added and never written.
    page_size : positions per page, a power of two.
    dtype : float32, float16 or bfloat16.
    slots, max_pages_per_slot : rows and columns of the page table; a slot holds up to
        ``max_pages_per_slot * page_size`` positions.

    Attributes
    ----------
    k, v : [layers, pages + 1, page_size, kv_heads, head_dim].
    page_table : int32[slots, max_pages_per_slot]; entries never allocated name the scratch page.
    free : pages that nobody owns; the last is taken first.
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
                raise OptionError(f"PagedKV: {name} is {value}, expected at least 1")
        if page_size & (page_size - 1):
            raise OptionError(f"PagedKV: page_size {page_size} is not a power of two")
        if dtype not in STORAGE:
            raise OptionError(f"PagedKV: dtype {dtype!r}, expected one of {sorted(STORAGE)}")
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
        self._references = [0] * pages
        self._owned: list[list[int]] = [[] for _ in range(slots)]
        self._staged = [device.pinned((self.max_pages,), "int32") for _ in range(slots)]
        for row in self._staged:
            row.array[:] = self.scratch_page

    @property
    def positions(self) -> int:
        """Most positions one slot can hold."""
        return self.max_pages * self.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers, keys and values."""
        return 2 * self.k.nbytes // (self.scratch_page + 1)

    def pages_of(self, slot: int) -> tuple[int, ...]:
        """Pages a slot owns, in order of position."""
        return tuple(self._owned[self._checked(slot)])

    def allocate(self, slot: int, positions: int, shared: Sequence[int] = ()) -> bool:
        """Own pages for positions 0..positions-1 of `slot`, growing what it has.

        Parameters
        ----------
        shared : pages of others, for the first positions of a slot that has none.

        Returns
        -------
        bool
            False, with nothing changed, when too few pages are free or the table is too short.
        """
        owned = self._owned[self._checked(slot)]
        wanted = -(-positions // self.page_size)
        if wanted <= len(owned):
            return True
        new = wanted - len(owned) - len(shared)
        if wanted > self.max_pages or new > len(self.free):
            return False
        pages = [*shared, *(self.free.pop() for _ in range(new))]
        for page in pages:
            self.hold(page)
        self._staged[slot].array[len(owned) : wanted] = pages
        owned.extend(pages)
        return True

    def hold(self, page: int) -> None:
        """Hold a page that is in use, or was just taken from `free`."""
        self._references[page] += 1

    def drop(self, page: int) -> None:
        """Hold a page no longer."""
        self._references[page] -= 1
        if self._references[page] == 0:
            self.free.append(page)

    def references(self, page: int) -> int:
        """How many hold a page."""
        return self._references[page]

    def release(self, slot: int) -> None:
        """Drop all pages of `slot`."""
        owned = self._owned[self._checked(slot)]
        self._staged[slot].array[: len(owned)] = self.scratch_page
        for page in reversed(owned):
            self.drop(page)
        owned.clear()

    def set_table(self, lane: Lane, slot: int) -> None:
        """Copy the slot's row to the device, in the lane's order."""
        lane.copy(self.page_table[self._checked(slot)], self._staged[slot], name="page table")

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise OptionError(f"PagedKV: slot {slot} outside 0..{self.slots - 1}")
        return slot
