"""The paged cache: who owns which page, and what the device's table says."""

import numpy as np
import pytest
from nets_util import own

from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import StreamLane
from graft.models.cache.kv import PagedKV


def cache(device, **changes) -> PagedKV:
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


def test_random_use_never_shares_or_loses_a_page(device):
    """After any sequence of growth and release, pages are owned once and all accounted for, a slot
    holds just enough, its pages never move, and a refusal changes nothing."""
    kv = cache(device)
    rng = np.random.default_rng(0)
    held = {0: 0, 1: 0, 2: 0}
    refused = 0
    for _ in range(500):
        slot = int(rng.integers(3))
        positions = int(rng.integers(0, 27))
        before = kv.pages_of(slot)
        if rng.random() < 0.3:
            kv.release(slot)
            held[slot] = 0
        elif kv.allocate(slot, positions):
            held[slot] = max(held[slot], -(-positions // 4))
            assert kv.pages_of(slot)[: len(before)] == before
        else:
            refused += 1
            assert kv.pages_of(slot) == before
        pages = [page for s in held for page in kv.pages_of(s)]
        assert len(pages) == len(set(pages)) and kv.scratch_page not in pages
        assert {s: len(kv.pages_of(s)) for s in held} == held
        assert len(kv.free) == 10 - len(pages)
    assert refused > 20


def test_the_devices_table_follows(device, stream):
    """set_table copies one slot's row; entries not owned name the scratch page, also after
    release."""
    kv = cache(device)
    assert (kv.page_table.to_host() == kv.scratch_page).all()
    own(stream, kv, 1, 9)
    stream.synchronize()
    table = kv.page_table.to_host()
    assert table[1].tolist() == [*kv.pages_of(1), 10, 10, 10]
    assert (table[[0, 2]] == 10).all()
    kv.release(1)
    kv.set_table(StreamLane(stream), 1)
    stream.synchronize()
    assert (kv.page_table.to_host() == 10).all() and len(kv.free) == 10


@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 12},
        {"page_size": 0},
        {"pages": 0},
        {"slots": -1},
        {"dtype": "int32"},
        {"max_pages_per_slot": 0},
    ],
)
def test_absurd_shapes_are_refused_by_name(device, changes):
    """A size or dtype that cannot work raises, naming it."""
    with pytest.raises(OptionError, match=next(iter(changes))):
        cache(device, **changes)


@pytest.mark.parametrize("slot", [-1, 3])
def test_slots_outside_the_cache_are_refused(device, slot):
    """Every method refuses a slot that the table does not have."""
    kv = cache(device)
    for call in (lambda: kv.allocate(slot, 1), lambda: kv.release(slot), lambda: kv.pages_of(slot)):
        with pytest.raises(OptionError, match=f"slot {slot}"):
            call()
