"""Row invariance: the bits of a row depend on that row and its past, on nothing else.

Every case compares logits, features, keys and values bit for bit with a slot fed one token at a
time, alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from nets_util import cached, forward, load_eagle3, load_llama, make_rows, own, same_bits
from tiny_models import llama_config, make_tiny_eagle3, make_tiny_llama

from graft.cudagraph.lanes import StreamLane

LENGTH = 38  # past one attention tile of 32
SHAPE = {"vocab_size": 96, "intermediate_size": 40}
SLOTS = 8
RNG = np.random.default_rng(12)
SEQUENCES = RNG.integers(0, 96, (SLOTS, LENGTH))


@dataclass
class Case:
    """A model with its drafter, and what each sequence gives one token at a time, alone."""

    model: object
    drafter: object
    logits: np.ndarray  # [SLOTS, LENGTH, vocab]
    features: np.ndarray
    cache: list[np.ndarray]
    drafts: np.ndarray  # [SLOTS, LENGTH - 1, hidden]
    draft_cache: list[np.ndarray]


def feed(case_or_model, stream, drafter, tokens, following, slots, positions):
    """One forward, then the drafter's entries of the same rows; logits, features, outputs."""
    model = case_or_model
    features = model.device.zeros((len(tokens), 3 * 48), "float32")
    logits = forward(stream, model, tokens, slots, positions, features)
    rows = make_rows(model.device, following, slots, positions)
    out = drafter.entries(StreamLane(stream), rows, features)
    stream.synchronize()
    return logits, features.to_host(), out.to_host()


@pytest.fixture(
    scope="module",
    params=[
        ("thread", "bfloat16"),
        ("thread", "float32"),
        ("warp", "bfloat16"),
        pytest.param(("warp", "float32"), marks=pytest.mark.full),
    ],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def case(device, request, tmp_path_factory):
    form, dtype = request.param
    folder = tmp_path_factory.mktemp("invariance")
    make_tiny_llama(folder / "target", dtype=dtype, **SHAPE)
    make_tiny_eagle3(folder / "head", llama_config(**SHAPE), dtype=dtype, draft_vocab=50)
    shape = {"slots": SLOTS, "pages": 100}
    model = load_llama(device, folder / "target", form=form, **shape)
    drafter = load_eagle3(device, folder / "head", model, **shape)
    stream = device.stream("reference")
    logits, features, drafts, cache, draft_cache = [], [], [], [], []
    for sequence in SEQUENCES:
        for kv in (model.kv, drafter.kv):
            own(stream, kv, 0, LENGTH)
        parts = [
            feed(model, stream, drafter, [sequence[t]], [sequence[(t + 1) % LENGTH]], 0, [t])
            for t in range(LENGTH)
        ]
        logits.append(np.concatenate([p[0] for p in parts]))
        features.append(np.concatenate([p[1] for p in parts]))
        drafts.append(np.concatenate([p[2] for p in parts]))
        cache.append(cached(model.kv, 0, LENGTH))
        draft_cache.append(cached(drafter.kv, 0, LENGTH))
        for kv in (model.kv, drafter.kv):
            kv.release(0)
    yield Case(
        model, drafter, np.array(logits), np.array(features), cache, np.array(drafts), draft_cache
    )
    stream.close()


@pytest.fixture
def clean(case):
    """All pages back before and after a test."""
    for slot in range(SLOTS):
        case.model.kv.release(slot)
        case.drafter.kv.release(slot)
    return case


def reserve(case, stream, slot, positions=LENGTH) -> None:
    for kv in (case.model.kv, case.drafter.kv):
        own(stream, kv, slot, positions)


def check_rows(case, result, sequences, positions) -> None:
    """Row r of a forward equals sequence `sequences[r]` at `positions[r]`, bit for bit."""
    logits, features, drafts = result
    for r, (s, p) in enumerate(zip(sequences, positions, strict=True)):
        assert same_bits(logits[r], case.logits[s, p]), f"logits of row {r}"
        assert same_bits(features[r], case.features[s, p]), f"features of row {r}"
        assert same_bits(drafts[r], case.drafts[s, p]), f"draft output of row {r}"


def check_cache(case, slot, sequence) -> None:
    assert same_bits(cached(case.model.kv, slot, LENGTH), case.cache[sequence])
    assert same_bits(cached(case.drafter.kv, slot, LENGTH), case.draft_cache[sequence])


def rows_of(sequence, positions):
    """Tokens and following tokens of a sequence at positions."""
    positions = np.asarray(positions)
    return SEQUENCES[sequence][positions], SEQUENCES[sequence][(positions + 1) % LENGTH]


@pytest.mark.parametrize("chunk", [2, 3, 4, 5, 7, 16, 17, 38])
def test_chunks_of_any_size_give_the_bits_of_single_rows(clean, stream, chunk):
    """M = 2, K + 1, and prefills of any length, whole or chunked, equal M = 1."""
    reserve(clean, stream, 1)
    for start in range(0, LENGTH, chunk):
        positions = np.arange(start, min(start + chunk, LENGTH))
        tokens, following = rows_of(3, positions)
        result = feed(clean.model, stream, clean.drafter, tokens, following, 1, positions)
        check_rows(clean, result, [3] * len(positions), positions)
    check_cache(clean, 1, 3)


@pytest.mark.parametrize("batch", range(1, 9))
def test_batches_of_any_size_give_the_bits_of_single_rows(clean, stream, batch):
    """Slots fed together, two rows each, in an order that changes at every round so that each
    row index is used, equal slots fed alone."""
    width, rng = 2, np.random.default_rng(batch)
    for slot in range(batch):
        reserve(clean, stream, slot)
    for start in range(0, LENGTH, width):
        order = rng.permutation(batch)
        positions = np.tile(np.arange(start, start + width), batch)
        sequences = np.repeat(order, width)
        pairs = [rows_of(s, np.arange(start, start + width)) for s in order]
        tokens, following = (np.concatenate(part) for part in zip(*pairs, strict=True))
        result = feed(clean.model, stream, clean.drafter, tokens, following, sequences, positions)
        check_rows(clean, result, sequences, positions)
    for slot in range(batch):
        check_cache(clean, slot, slot)


def test_every_row_index_among_padding_gives_the_same_bits(clean, stream):
    """One live row at each index of eight, the others padding, equals that row alone."""
    reserve(clean, stream, 2)
    for index in range(8):
        for start in range(LENGTH) if index == 0 else (0, 31, 32, 37):
            tokens, following = (np.full(8, 17) for _ in range(2))
            slots, positions = np.full(8, -1), np.full(8, -1)
            tokens[index : index + 1], following[index : index + 1] = rows_of(4, [start])
            slots[index], positions[index] = 2, start
            result = feed(clean.model, stream, clean.drafter, tokens, following, slots, positions)
            check_rows(clean, [part[index : index + 1] for part in result], [4], [start])
    check_cache(clean, 2, 4)


def test_shuffled_pages_give_the_same_bits(clean, stream):
    """Where a slot's pages lie, and among whose, changes nothing."""
    rng = np.random.default_rng(7)
    for kv in (clean.model.kv, clean.drafter.kv):
        kv.free[:] = rng.permutation(kv.free).tolist()
    for held in range(8, LENGTH + 8, 8):
        for slot in rng.permutation(5):
            reserve(clean, stream, int(slot), held)
    pages = clean.model.kv.pages_of(3)
    assert list(pages) != sorted(pages)
    for start in range(0, LENGTH, 19):
        positions = np.arange(start, start + 19)
        for slot in (3, 0):
            tokens, following = rows_of(slot, positions)
            result = feed(clean.model, stream, clean.drafter, tokens, following, slot, positions)
            check_rows(clean, result, [slot] * 19, positions)
    check_cache(clean, 3, 3)


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_page_size_changes_no_bit(device, stream, tmp_path, page_size):
    """Pages of 1, 4 or 64 positions give the logits of pages of 8."""
    make_tiny_llama(tmp_path, dtype="float16", **SHAPE)
    tokens = SEQUENCES[0]
    results = []
    for size in (8, page_size):
        model = load_llama(
            device, tmp_path, page_size=size, pages=256 // size, max_pages_per_slot=64 // size
        )
        own(stream, model.kv, 1, LENGTH)
        results.append(forward(stream, model, tokens, 1, range(LENGTH)))
    assert same_bits(*results)
