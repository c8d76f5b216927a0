"""Token bitmasks applied to logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from reference_round import pack_bits

from graft.cudagraph.driver.dtypes import from_float32
from graft.cudagraph.lanes import StreamLane
from graft.sampling.mask import MaskApply

STORAGE: dict[str, tuple[type, int, type]] = {
    "float32": (np.float32, 0xFF800000, np.uint32),
    "float16": (np.float16, 0xFC00, np.uint16),
    "bfloat16": (np.uint16, 0xFF80, np.uint16),
}


@pytest.fixture
def masked(device, stream, block) -> Callable[..., np.ndarray]:
    """Return a function that applies masks to logits and returns the result."""
    apply = MaskApply(device, block=block)

    def run(logits, legal, dtype="float32", token_limit=None, **maps):
        array = device.from_host(logits, dtype)
        mask = device.from_host(pack_bits(legal), "int32")
        maps = {name: device.from_host(ids, "int32") for name, ids in maps.items()}
        apply(StreamLane(stream), array, mask, token_limit=token_limit, **maps)
        stream.synchronize()
        return array.to_host()

    return run


def _bits(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return random logits in the storage form of a dtype."""
    values = rng.normal(0, 3, shape).astype(np.float32)
    if dtype == "float32":
        return values
    return from_float32(values, dtype)


@pytest.mark.parametrize("dtype", list(STORAGE))
@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 1000])
def test_mask_apply_sets_illegal_logits_only(masked, dtype, size):
    """Every bit determines its column, even if the vocabulary ends within a mask word."""
    rng = np.random.default_rng(size)
    legal = rng.random((4, size)) < 0.5
    legal[2:, :] = np.array([[True], [False]])  # words that are all ones and all zeros
    logits = _bits(rng, dtype, (4, size))
    _, infinity, word = STORAGE[dtype]
    wanted = np.where(legal, logits.view(word), word(infinity))
    np.testing.assert_array_equal(masked(logits, legal, dtype).view(word), wanted)


def test_mask_apply_selects_mask_rows(masked):
    """`mask_row` selects the mask row of each row of logits: rows may share one, -1 is none."""
    rng = np.random.default_rng(1)
    legal = rng.random((3, 100)) < 0.3
    logits = _bits(rng, "float32", (5, 100))
    choice = np.array([2, -1, 0, 2, -1], np.int32)
    is_skipped = (choice < 0)[:, None]
    wanted = np.where(legal[choice] | is_skipped, logits, -np.inf)
    got = masked(logits, legal, mask_row=choice)
    np.testing.assert_array_equal(got, wanted.astype(np.float32))


def test_mask_apply_maps_drafter_columns(masked):
    """With `d2t`, a column is legal if its target id is below the limit and its bit is set."""
    rng = np.random.default_rng(2)
    legal = rng.random((2, 90)) < 0.5
    d2t = np.array([5, 89, 0, 31, 32, 63, 64, -1, 90, 1000, 5, 79, 80], np.int32)
    logits = _bits(rng, "float32", (2, d2t.size))
    inside = (d2t >= 0) & (d2t < 80)
    legal_columns = inside & legal[:, np.where(inside, d2t, 0)]
    wanted = np.where(legal_columns, logits, np.float32(-np.inf))
    found = masked(logits, legal, d2t=d2t, token_limit=80)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("limit", [1, 5, 32, 37, 64, 99])
def test_mask_apply_token_limit_overrides_mask(masked, limit):
    """Ids beyond the tokenizer's vocabulary are illegal, whatever the mask."""
    logits = np.zeros((1, 100), np.float32)
    everything = np.ones((1, 128), bool)
    got = masked(logits, everything, token_limit=limit)
    np.testing.assert_array_equal(np.isneginf(got[0]), np.arange(100) >= limit)
