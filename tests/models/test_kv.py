"""Paged KV cache: page allocation and the page table on the device."""

import numpy as np
import pytest
from model_util import allocate_pages

from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import StreamLane
from graft.models.cache.kv import PagedKV


def make_cache(device, **changes) -> PagedKV:
    options = {
        "layers": 1,
        "pages": 10,
        "page_size": 4,
        "kv_heads": 1,
        "head_dim": 4,
        "dtype": "bfloat16",
        "slots": 3,
        "max_pages_per_slot": 6,
    }
    return PagedKV(device, **{**options, **changes})


def test_paged_kv_random_use_never_shares_or_loses_pages(device):
    """When slots grow and are released at random, no page is lost or belongs to two slots.

    A slot has as many pages as its positions need. Its pages stay the same while it grows, and a
    failed allocation changes nothing.
    """
    kv = make_cache(device)
    rng = np.random.default_rng(0)
    num_pages = {0: 0, 1: 0, 2: 0}
    failed = 0
    for _ in range(500):
        slot = int(rng.integers(3))
        positions = int(rng.integers(0, 27))
        before = kv.pages_of(slot)
        if rng.random() < 0.3:
            kv.release(slot)
            num_pages[slot] = 0
        elif kv.allocate(slot, positions):
            num_pages[slot] = max(num_pages[slot], -(-positions // 4))
            assert kv.pages_of(slot)[: len(before)] == before
        else:
            failed += 1
            assert kv.pages_of(slot) == before
        pages = []
        for owner, count in num_pages.items():
            owned = kv.pages_of(owner)
            assert len(owned) == count
            pages += owned
        assert len(pages) == len(set(pages))
        assert kv.scratch_page not in pages
        assert len(kv.free) == 10 - len(pages)
    assert failed > 20


def test_paged_kv_set_table_copies_one_slot(device, stream):
    """Page-table entries without a page refer to the scratch page, also after a release."""
    kv = make_cache(device)
    assert (kv.page_table.to_host() == kv.scratch_page).all()
    allocate_pages(stream, kv, 1, 9)
    stream.synchronize()
    table = kv.page_table.to_host()
    assert table[1].tolist() == [*kv.pages_of(1), 10, 10, 10]
    assert (table[[0, 2]] == 10).all()
    kv.release(1)
    kv.set_table(StreamLane(stream), 1)
    stream.synchronize()
    assert (kv.page_table.to_host() == 10).all() and len(kv.free) == 10


#: Calls that raise an OptionError, with words of the error.
INVALID_CALLS = [
    (lambda device: make_cache(device, page_size=12), "page_size is 12"),
    (lambda device: make_cache(device, page_size=0), "page_size is 0"),
    (lambda device: make_cache(device, pages=0), "pages is 0"),
    (lambda device: make_cache(device, slots=-1), "slots is -1"),
    (lambda device: make_cache(device, dtype="int32"), "dtype is 'int32'"),
    (lambda device: make_cache(device, max_pages_per_slot=0), "max_pages_per_slot is 0"),
    (lambda device: make_cache(device).allocate(-1, 1), "slot -1"),
    (lambda device: make_cache(device).allocate(3, 1), "slot 3"),
    (lambda device: make_cache(device).release(-1), "slot -1"),
    (lambda device: make_cache(device).release(3), "slot 3"),
    (lambda device: make_cache(device).pages_of(-1), "slot -1"),
    (lambda device: make_cache(device).pages_of(3), "slot 3"),
]


@pytest.mark.parametrize(
    ("call", "words"), INVALID_CALLS, ids=[words for _, words in INVALID_CALLS]
)
def test_paged_kv_rejects_invalid_sizes_and_slots(device, call, words):
    with pytest.raises(OptionError, match=words):
        call(device)
