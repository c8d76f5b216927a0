"""Bitmasks on logits: dtypes, fused drafter vocabulary, row skip, odd sizes, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from reference_round import pack_bits

from graft.cudagraph.dtypes import from_float32
from graft.cudagraph.errors import OptionError, ShapeError
from graft.cudagraph.lanes import StreamLane
from graft.sampling.mask import MaskApply

STORAGE: dict[str, tuple[type, int, type]] = {
    "float32": (np.float32, 0xFF800000, np.uint32),
    "float16": (np.float16, 0xFC00, np.uint16),
    "bfloat16": (np.uint16, 0xFF80, np.uint16),
}


@pytest.fixture(params=[1, 64], ids=["block1", "block64"])
def apply(request, device):
    """The wrapper in both block shapes."""
    return MaskApply(device, block=request.param)


def _bits(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random logits in storage form."""
    values = rng.normal(0, 3, shape).astype(np.float32)
    return from_float32(values, dtype) if dtype != "float32" else values


@pytest.mark.parametrize("dtype", list(STORAGE))
@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 1000])
def test_illegal_columns_become_minus_infinity_and_others_keep_their_bits(
    device, stream, apply, dtype, size
):
    """Every bit of every word decides its column, also where the vocabulary ends inside a word."""
    rng = np.random.default_rng(size)
    legal = rng.random((4, size)) < 0.5
    legal[2:, :] = np.array([[True], [False]])  # words that are all ones and all zeros
    logits = _bits(rng, dtype, (4, size))
    array = device.from_host(logits, dtype)
    apply(StreamLane(stream), array, device.from_host(pack_bits(legal), "int32"))
    stream.synchronize()
    _, infinity, word = STORAGE[dtype]
    wanted = np.where(legal, logits.view(word), word(infinity))
    np.testing.assert_array_equal(array.to_host().view(word), wanted)


def test_rows_choose_their_mask_and_negative_rows_are_left_alone(device, stream, apply):
    """mask_row picks a row per logits row, several may share one, and -1 skips the row."""
    rng = np.random.default_rng(1)
    legal = rng.random((3, 100)) < 0.3
    logits = _bits(rng, "float32", (5, 100))
    choice = np.array([2, -1, 0, 2, -1], np.int32)
    array = device.from_host(logits, "float32")
    apply(
        StreamLane(stream), array, device.from_host(pack_bits(legal), "int32"),
        mask_row=device.from_host(choice, "int32"),
    )  # fmt: skip
    stream.synchronize()
    wanted = np.where(legal[choice] | (choice < 0)[:, None], logits, -np.inf)
    np.testing.assert_array_equal(array.to_host(), wanted.astype(np.float32))


def test_drafter_columns_are_judged_by_their_target_id(device, stream, apply):
    """With d2t a column is legal iff its target id is inside the bound and its bit is set."""
    rng = np.random.default_rng(2)
    legal = rng.random((2, 90)) < 0.5
    d2t = np.array([5, 89, 0, 31, 32, 63, 64, -1, 90, 1000, 5, 79, 80], np.int32)
    logits = _bits(rng, "float32", (2, d2t.size))
    array = device.from_host(logits, "float32")
    apply(
        StreamLane(stream), array, device.from_host(pack_bits(legal), "int32"),
        d2t=device.from_host(d2t, "int32"), token_limit=80,
    )  # fmt: skip
    stream.synchronize()
    inside = (d2t >= 0) & (d2t < 80)
    ok = inside & legal[:, np.where(inside, d2t, 0)]
    np.testing.assert_array_equal(array.to_host(), np.where(ok, logits, -np.inf).astype("f4"))


@pytest.mark.parametrize("limit", [1, 5, 32, 37, 64, 99])
def test_ids_at_or_above_the_bound_are_illegal_even_with_their_bit_set(
    device, stream, apply, limit
):
    """Columns that the tokenizer does not have never pass, whatever the mask says."""
    array = device.from_host(np.zeros((1, 100), np.float32), "float32")
    ones = device.from_host(np.full((1, 4), -1, np.int32), "int32")
    apply(StreamLane(stream), array, ones, token_limit=limit)
    stream.synchronize()
    np.testing.assert_array_equal(np.isneginf(array.to_host()[0]), np.arange(100) >= limit)


def test_wrong_shapes_and_dtypes_are_refused_by_name(device, stream, apply):
    """Each refusal names the argument and the dimension."""
    lane = StreamLane(stream)
    logits, mask = device.zeros((2, 64), "float32"), device.zeros((2, 2), "int32")
    with pytest.raises(ShapeError, match="logits: dtype int32"):
        apply(lane, device.zeros((2, 64), "int32"), mask)
    with pytest.raises(ShapeError, match="W=1"):
        apply(lane, logits, device.zeros((2, 1), "int32"))
    with pytest.raises(ShapeError, match="N=1"):
        apply(lane, logits, mask[:1])
    with pytest.raises(ShapeError, match="mask_row"):
        apply(lane, logits, mask, mask_row=device.zeros((3,), "int32"))
    with pytest.raises(ShapeError, match="d2t"):
        apply(lane, logits, mask, d2t=device.zeros((63,), "int32"))
    with pytest.raises(OptionError, match="token_limit"):
        apply(lane, logits, mask, token_limit=65)
