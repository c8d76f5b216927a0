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

LENGTH = 35  # past one attention tile of 32
SHAPE = {"vocab_size": 72, "intermediate_size": 40, "num_attention_heads": 4}
SLOTS = 8
SEQUENCES = np.random.default_rng(12).integers(0, 72, (4, LENGTH))


@dataclass
class Case:
    """A model with its drafter, and what each sequence gives one token at a time, alone."""

    model: object
    drafter: object
    parts: list[list[np.ndarray]]  # by sequence: logits, features, draft outputs by position
    caches: list[list[np.ndarray]]  # by sequence: of model and drafter

    @property
    def both(self):
        return self.model.kv, self.drafter.kv


def feed(case, stream, sequences, slots, positions):
    """One forward, and the drafter's entries of the same rows; logits, features, outputs.

    A row's sequence of -1 is padding.
    """
    sequences, positions = np.asarray(sequences), np.asarray(positions)
    tokens = SEQUENCES[sequences, positions]
    following = SEQUENCES[sequences, (positions + 1) % LENGTH]
    slots, positions = np.where(sequences < 0, -1, slots), np.where(sequences < 0, -1, positions)
    device = case.model.device
    features = device.zeros((len(tokens), 3 * 48), "float32")
    logits = forward(stream, case.model, tokens, slots, positions, features)
    rows = make_rows(device, following, slots, positions)
    out = case.drafter.entries(StreamLane(stream), rows, features)
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
    made = Case(model, load_eagle3(device, folder / "head", model, **shape), [], [])
    stream = device.stream("reference")
    for number in range(len(SEQUENCES)):
        reserve(made, stream, 0)
        rows = [feed(made, stream, [number], 0, [t]) for t in range(LENGTH)]
        made.parts.append([np.concatenate(part) for part in zip(*rows, strict=True)])
        made.caches.append([cached(kv, 0, LENGTH) for kv in made.both])
    yield made
    stream.close()


@pytest.fixture
def clean(case):
    """All pages back before a test."""
    for slot in range(SLOTS):
        for kv in case.both:
            kv.release(slot)
    return case


def reserve(case, stream, slot, positions=LENGTH) -> None:
    for kv in case.both:
        own(stream, kv, slot, positions)


def check(case, stream, sequences, slots, positions) -> None:
    """Each row of a forward equals its sequence at its position, bit for bit."""
    result = feed(case, stream, sequences, slots, positions)
    for r, (s, p) in enumerate(zip(sequences, positions, strict=True)):
        for name, got, wanted in zip(("logits", "features", "draft"), result, case.parts[s],
                                     strict=True):  # fmt: skip
            assert s < 0 or same_bits(got[r], wanted[p]), f"{name} of row {r}"


def check_cache(case, slot, sequence) -> None:
    for kv, wanted in zip(case.both, case.caches[sequence], strict=True):
        assert same_bits(cached(kv, slot, LENGTH), wanted)


@pytest.mark.parametrize("chunk", [2, 3, 4, 7, 17, LENGTH])
def test_chunks_of_any_size_give_the_bits_of_single_rows(clean, stream, chunk):
    """M = 2, K + 1, and prefills of any length, whole or chunked, equal M = 1."""
    reserve(clean, stream, 1)
    for start in range(0, LENGTH, chunk):
        positions = range(start, min(start + chunk, LENGTH))
        check(clean, stream, [3] * len(positions), 1, positions)
    check_cache(clean, 1, 3)


def test_batches_of_any_size_give_the_bits_of_single_rows(clean, stream):
    """One to eight slots a forward, one to three rows each, who and in which order changing every
    time, equal slots fed alone."""
    rng, done = np.random.default_rng(3), np.zeros(SLOTS, int)
    for slot in range(SLOTS):
        reserve(clean, stream, slot)
    seen: set[int] = set()
    while (done < LENGTH).any():
        left = rng.permutation(np.flatnonzero(done < LENGTH))
        chosen = left[: int(rng.integers(1, SLOTS + 1))]
        seen.add(len(chosen))
        counts = np.minimum(rng.integers(1, 4, len(chosen)), LENGTH - done[chosen])
        slots = np.repeat(chosen, counts)
        positions = np.concatenate([
            np.arange(done[s], done[s] + c) for s, c in zip(chosen, counts, strict=True)
        ])  # fmt: skip
        check(clean, stream, slots % len(SEQUENCES), slots, positions)
        done[chosen] += counts
    assert seen == set(range(1, SLOTS + 1))
    for slot in range(SLOTS):
        check_cache(clean, slot, slot % len(SEQUENCES))


def test_every_row_index_among_padding_gives_the_same_bits(clean, stream):
    """One live row at each index of eight, the others padding, equals that row alone."""
    reserve(clean, stream, 2)
    rows = [(t % 8, t) for t in range(LENGTH)] + [(index, 32) for index in range(8)]
    for index, position in rows:
        sequences = np.full(8, -1)
        sequences[index] = 2
        check(clean, stream, sequences, 2, [position] * 8)
    check_cache(clean, 2, 2)


def test_shuffled_pages_give_the_same_bits(clean, stream):
    """Where a slot's pages lie, and among whose, changes nothing."""
    rng = np.random.default_rng(7)
    for kv in clean.both:
        loose = kv.allocator.take(kv.allocator.free)
        kv.allocator.give([int(page) for page in rng.permutation(loose)])
    for held in range(8, LENGTH + 8, 8):
        for slot in rng.permutation(5):
            reserve(clean, stream, int(slot), held)
    pages = clean.model.kv.pages_of(3)
    assert list(pages) != sorted(pages)
    for positions in (range(19), range(19, LENGTH)):
        for slot in (3, 0):
            check(clean, stream, [slot] * len(positions), slot, positions)
    check_cache(clean, 3, 3)


def test_page_size_changes_no_bit(device, stream, tmp_path):
    """Pages of 1, 4 or 64 positions give the logits of pages of 8."""
    make_tiny_llama(tmp_path, dtype="float16", **SHAPE)
    results = []
    for size in (8, 1, 4, 64):
        model = load_llama(
            device, tmp_path, page_size=size, pages=256 // size, max_pages_per_slot=64 // size
        )
        own(stream, model.kv, 1, LENGTH)
        results.append(forward(stream, model, SEQUENCES[0], 1, range(LENGTH)))
    assert all(same_bits(results[0], result) for result in results[1:])
