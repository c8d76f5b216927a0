"""Tests of row invariance: a row's result depends only on the row and its slot's earlier positions.

Every test compares logits, features and KV cache, bit for bit, with a reference. In the reference,
every forward pass processes a single token.
"""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
from model_util import (
    FORMS,
    allocate_pages,
    load_eagle3,
    load_llama,
    make_rows,
    read_cache,
    same_bits,
)
from round_simulator import result_row
from tiny_models import QWEN2, SMOLLM3, llama_config, make_tiny_eagle3, make_tiny_llama

from graft.cudagraph.graph.graph import Graph
from graft.cudagraph.lanes import StreamLane
from graft.sampling.results import row_words

LENGTH = 35  # past one attention tile of 32
SHAPE = {"vocab_size": 72, "intermediate_size": 40, "num_attention_heads": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
NAMES = ("logits", "features", "draft")
SLOTS = 8
RUN = 5  # Rows.rows_per_slot, which is only a hint: the slots have other numbers of rows
SEQUENCES = np.random.default_rng(12).integers(0, 72, (4, LENGTH))
# Three sequences have the same tokens up to position ROOT, and two of them up to position FORK.
ROOT = 26
FORK = 31
SEQUENCES[:2, : ROOT + 1] = SEQUENCES[2, : ROOT + 1]
SEQUENCES[1, : FORK + 1] = SEQUENCES[2, : FORK + 1]
# Sequences in the order in which the references are computed. The number is the first position at
# which the results differ from those of the previous sequence: a draft also reads the next token.
FIRST_DIFFERENT = {0: 0, 2: ROOT, 1: FORK, 3: 0}


class Forward:
    """CUDA graph of a forward pass of `count` rows and of the EAGLE-3 entries of the same rows."""

    def __init__(self, model, drafter, count):
        device = model.device
        zeros = np.zeros(count, np.int32)
        tree = device.zeros((count,), "uint64")
        rows = make_rows(device, zeros, zeros, zeros)
        entries = make_rows(device, zeros, zeros, zeros)
        self.rows = replace(rows, ancestors=tree, rows_per_slot=RUN)
        self.entries = replace(entries, ancestors=tree, rows_per_slot=RUN)
        features = device.zeros((count, 3 * 48), "float32")
        logits = device.zeros((count, model.vocab_size), "float32")
        graph = Graph(device, f"{count} rows")
        lane = graph.lane("model")
        model.forward(lane, self.rows, features, logits)
        self.results = logits, features, drafter.entries(lane, self.entries, features)
        self.exec = graph.instantiate()

    def run(self, stream, tokens, following, slots, positions, tree):
        masks = np.broadcast_to(tree, len(tokens))
        self.rows.ancestors.copy_from(masks.astype(np.uint64))
        for rows, token in ((self.rows, tokens), (self.entries, following)):
            arrays = (rows.token, rows.slot, rows.pos)
            for array, values in zip(arrays, (token, slots, positions), strict=True):
                values = np.broadcast_to(values, array.shape)
                array.copy_from(values.astype(np.int32))
        self.exec.launch(stream)
        self.exec.synchronize()
        return [result.to_host() for result in self.results]


class Case:
    """A model, its drafter, and the results of processing each sequence one token at a time."""

    def __init__(self, model, drafter, stream):
        self.both = model.kv, drafter.kv
        self.model = model
        self.forward_of = functools.cache(functools.partial(Forward, model, drafter))
        # parts[s] is the list [logits, features, draft outputs] of sequence s. caches[s] is the
        # list of the KV cache contents of model and drafter.
        self.parts = [[]] * len(SEQUENCES)
        self.caches = [[]] * len(SEQUENCES)
        self.reserve(stream, 0)
        rows = []
        for number, first in FIRST_DIFFERENT.items():
            rows = rows[:first]
            rows += [self.feed(stream, [number], 0, [t]) for t in range(first, LENGTH)]
            self.parts[number] = [np.concatenate(part) for part in zip(*rows, strict=True)]
            self.caches[number] = [read_cache(kv, 0, LENGTH) for kv in self.both]

    def reserve(self, stream, slot, positions=LENGTH):
        for kv in self.both:
            allocate_pages(stream, kv, slot, positions)

    def feed(self, stream, sequences, slots, positions, tree=0):
        """Run a forward pass and return logits, features and draft outputs.

        Row i has token ``positions[i]`` of sequence ``sequences[i]``. Sequence -1 gives a padding
        row.
        """
        sequences = np.asarray(sequences)
        positions = np.asarray(positions)
        tokens = SEQUENCES[sequences, positions]
        following = SEQUENCES[sequences, (positions + 1) % LENGTH]
        slots = np.where(sequences < 0, -1, slots)
        positions = np.where(sequences < 0, -1, positions)
        return self.forward_of(len(tokens)).run(stream, tokens, following, slots, positions, tree)

    def check(self, stream, sequences, slots, positions, tree=0):
        """Check that each row equals the reference at its sequence and position, bit for bit."""
        result = self.feed(stream, sequences, slots, positions, tree)
        for r, (s, p) in enumerate(zip(sequences, positions, strict=True)):
            for name, got, wanted in zip(NAMES, result, self.parts[s], strict=True):
                if name == "draft" and tree != 0:
                    # An EAGLE-3 entry also reads the NEXT token. The entry of a node that several
                    # paths share is therefore right for one of the paths only.
                    continue
                is_padding = s < 0
                if not is_padding:
                    assert same_bits(got[r], wanted[p]), f"{name} of row {r}"

    def check_cache(self, slot, sequence, length=LENGTH):
        for kv, wanted in zip(self.both, self.caches[sequence], strict=True):
            assert same_bits(read_cache(kv, slot, length), wanted[:, :, :length].copy())


@pytest.fixture(
    scope="module",
    params=[
        "thread-bfloat16-8",
        "thread-float32-8",
        "warp-bfloat16-8",
        "thread-bfloat16-8-qwen2",
        pytest.param("warp-bfloat16-8-qwen2", marks=pytest.mark.full),
        pytest.param("thread-float16-8-smollm3", marks=pytest.mark.full),
        pytest.param("warp-float32-8", marks=pytest.mark.full),
        pytest.param("warp-float16-64", marks=pytest.mark.full),
    ],
)
def case(device, request, tmp_path_factory):
    form, dtype, head_dim, *architecture = request.param.split("-")
    if form not in FORMS:
        pytest.skip(f"GPU code has no kernels of the form {form!r}")
    folder = tmp_path_factory.mktemp("invariance")
    sizes = {**SHAPE, "head_dim": int(head_dim)}
    fields = {}
    if architecture:
        fields = {"qwen2": QWEN2, "smollm3": SMOLLM3}[architecture[0]] | {"rope_scaling": YARN}
    make_tiny_llama(folder / "target", dtype=dtype, **sizes, **fields)
    make_tiny_eagle3(folder / "head", llama_config(**sizes), dtype=dtype, draft_vocab=50)
    shape = {"slots": SLOTS, "pages": 100}
    model = load_llama(device, folder / "target", form=form, **shape)
    drafter = load_eagle3(device, folder / "head", model, **shape)
    stream = device.stream("reference")
    yield Case(model, drafter, stream)
    stream.close()


@pytest.fixture
def clean(case):
    """Return the case with all pages released."""
    for slot in range(SLOTS):
        for kv in case.both:
            kv.release(slot)
    return case


@pytest.mark.parametrize(
    "chunk", [3, 17, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 4, 7, LENGTH))]
)
@pytest.mark.full("warp-bfloat16-8-3")
def test_row_invariance_of_prefill_chunks(clean, stream, chunk):
    clean.reserve(stream, 1)
    for start in range(0, LENGTH, chunk):
        positions = range(start, min(start + chunk, LENGTH))
        clean.check(stream, [3] * len(positions), 1, positions)
    clean.check_cache(1, 3)


@pytest.mark.full("thread-float32-8")
def test_row_invariance_of_mixed_batches(clean, stream):
    """The rows of random batches equal the reference, bit for bit.

    A forward pass has one to eight slots with one to three rows each, in random order. Pages are
    shuffled, and some rows are padding. Two slots get all positions, and the others only the first.
    """
    rng = np.random.default_rng(3)
    done = np.zeros(SLOTS, int)
    lengths = np.array([10, LENGTH, 10, LENGTH, *range(12, 12 + SLOTS - 4)])
    for kv in clean.both:
        kv.free[:] = rng.permutation(kv.free).tolist()
    for held in range(8, LENGTH + 8, 8):
        for slot in rng.permutation(SLOTS):
            clean.reserve(stream, int(slot), held)
    pages = list(clean.both[0].pages_of(3))
    assert pages != sorted(pages)
    sizes = itertools.cycle(range(SLOTS, 0, -1))
    seen: set[int] = set()
    while (done < lengths).any():
        left = rng.permutation(np.flatnonzero(done < lengths))
        chosen = left[: next(sizes)]
        seen.add(len(chosen))
        counts = rng.integers(1, 4, len(chosen))
        counts = np.minimum(counts, lengths[chosen] - done[chosen])
        slots = np.repeat(chosen, counts)
        ranges = []
        for s, c in zip(chosen, counts, strict=True):
            ranges.append(np.arange(done[s], done[s] + c))
        positions = np.concatenate(ranges)
        sequences = slots % len(SEQUENCES)
        at = rng.integers(0, len(slots) + 1, rng.integers(3))
        clean.check(
            stream,
            np.insert(sequences, at, -1),
            np.insert(slots, at, 0),
            np.insert(positions, at, 0),
        )
        done[chosen] += counts
    assert seen == set(range(1, SLOTS + 1))
    for slot, length in enumerate(lengths.tolist()):
        clean.check_cache(slot, slot % len(SEQUENCES), length)


def random_tree(rng):
    """Return (sequence, position) of the nodes of a random tree, parents first, and ancestor masks.

    The mask of a node has the bits of its ancestors and its own bit.
    """
    node_count = 2 * (LENGTH - ROOT - 1) + LENGTH - FORK - 1
    nodes = []
    paths = {}
    tips = {0: ROOT, 2: ROOT}
    while len(nodes) < node_count:
        unfinished = [s for s, p in tips.items() if p + 1 < LENGTH]
        s = int(rng.choice(unfinished))
        is_fork = s == 1 and tips[s] == FORK
        parent = (2 if is_fork else s, tips[s])
        tips[s] += 1
        node = (s, tips[s])
        own_bit = 1 << len(nodes)
        paths[node] = paths.get(parent, 0) | own_bit
        nodes.append(node)
        if s == 2 and tips[s] == FORK:
            tips[1] = FORK
    return nodes, [paths[node] for node in nodes]


@pytest.mark.full("thread-float32-8")
def test_row_invariance_of_draft_trees_and_compaction(clean, stream):
    """The rows of a draft tree have the same bits as rows of chains.

    The tree has three paths in one forward pass, in random order. After compaction, the KV cache
    and the features equal those of a chain with the tokens of the accepted path.
    """
    rng = np.random.default_rng(3)
    for slot, accepted in ((1, 2), (5, 1), (6, 0)):
        clean.reserve(stream, slot, 64)
        clean.feed(stream, [accepted] * ROOT, slot, range(ROOT))
        nodes, paths = random_tree(rng)
        sequences, positions = zip((accepted, ROOT), *nodes, strict=True)
        clean.check(stream, sequences, slot, positions, [0, *paths])

        wanted = []
        for node in nodes:
            sequence, position = node
            is_shared = accepted == 1 and sequence == 2 and position <= FORK
            if sequence == accepted or is_shared:
                wanted.append(node)
        wanted.sort(key=lambda node: node[1])
        width = len(nodes) + 1
        rows = [0, *(nodes.index(node) + 1 for node in wanted)]
        result = np.zeros((1, row_words(len(nodes))), np.int32)
        committed = result_row([0] * len(rows), slot=slot, old_n=ROOT)
        result[0, : len(committed)] = committed
        result[0, -width:][: len(rows)] = rows
        model = clean.model
        device = clean.model.device
        features = clean.forward_of(width).results[1]
        model.kernels.attention.compact(
            StreamLane(stream),
            model.kv,
            device.from_host(np.array([slot], np.int32)),
            device.from_host(result),
            features,
            device.zeros((1,), "int32"),
        )
        stream.synchronize()
        assert same_bits(read_cache(model.kv, slot, LENGTH), clean.caches[accepted][0])
        kept = features.to_host()[: len(rows)]
        assert same_bits(kept, clean.parts[accepted][1][ROOT:])
