"""Tests of the attention kernels.

Split attention on tensor cores is compared with a float64 reference. Its results for many rows are
also compared, bit for bit, with its results for single rows. The kernels for the soft device are
compiled for two register widths, and the results of the two variants are compared.
"""

from dataclasses import replace
from pathlib import Path

import model_util
import numpy as np
import numpy_llama
import pytest
from machine_code import Variant, compile_variant
from model_util import download, make_rows, same_bits, upload
from reference_round import Tree
from tiny_models import rounded

from graft.cudagraph.graph.graph import Graph
from graft.cudagraph.lanes import StreamLane
from graft.models.cache.kv import PagedKV
from graft.models.llm.kernels import attention
from graft.models.llm.kernels.library import ModelKernels
from graft.models.llm.kernels.loader import FOLDER

CPU = Path("/proc/cpuinfo").read_text()
SPLIT = 64  # positions per split; splits s and s + 32 belong to the same part


class Case:
    """Two slots of `length` positions in shuffled pages, with random queries for every position."""

    def __init__(self, device, heads=4, kv_heads=1, dim=64, dtype="bfloat16", length=600, page=16):
        rng = np.random.default_rng(length)
        pages = -(-length // page)
        self.device = device
        self.heads = heads
        self.length = length
        self.kv = PagedKV(
            device,
            layers=2,
            pages=2 * pages,
            page_size=page,
            kv_heads=kv_heads,
            head_dim=dim,
            dtype=dtype,
            slots=2,
            max_pages_per_slot=pages,
        )
        shuffled = np.random.default_rng(page).permutation(self.kv.free)
        self.kv.free[:] = shuffled.tolist()
        self.kernels = ModelKernels(device, "warp")
        self.query = 3 * model_util.normal(rng, 2, length, heads, dim)
        key = model_util.normal(rng, 2, length, kv_heads, dim)
        value = model_util.normal(rng, 2, length, kv_heads, dim)
        self.key = rounded(key, dtype)
        self.value = rounded(value, dtype)
        for slot in range(2):
            assert self.kv.allocate(slot, length)
        pages_by_slot = [self.kv.pages_of(slot) for slot in range(2)]
        self.table = np.array(pages_by_slot, np.int32)
        self.kv.page_table.copy_from(self.table)
        self.fill()

    def fill(self, keys=None, values=None):
        """Write keys and values [2, length, kv_heads, dim] of both slots to layer 1."""
        at = np.arange(self.length)
        page = self.table[:, at // self.kv.page_size]
        inside = at % self.kv.page_size
        keys = self.key if keys is None else keys
        values = self.value if values is None else values
        for cache, given in ((self.kv.k, keys), (self.kv.v, values)):
            stored = np.zeros(cache.shape, np.float32)
            stored[1, page, inside] = given
            cache.copy_from(upload(self.device, stored, self.kv.dtype).to_host())

    def run(self, lane, slots, positions, run=1, paths=None, queries=None, dtype="float32"):
        """Add the attention kernel to a lane and return its output array.

        Unless `queries` is given, row r uses the query of position ``positions[r]`` of slot
        ``slots[r]``. `run` is passed on as ``rows_per_slot``, and `paths` contains the ancestor
        masks of the rows. The output has the given dtype.
        """
        count = len(positions)
        dim = self.kv.head_dim
        slots = np.broadcast_to(slots, count)
        all_heads = self.heads + 2 * self.kv.kv_heads
        qkv = np.full((count, all_heads, dim), 7.0, np.float32)
        if queries is None:
            clipped = np.clip(positions, 0, self.length - 1)
            queries = self.query[slots, clipped]
        qkv[:, : self.heads] = queries
        rows = replace(make_rows(self.device, [0] * count, slots, positions), rows_per_slot=run)
        if paths is not None:
            ancestors = self.device.from_host(np.array(paths, np.uint64))
            rows = replace(rows, ancestors=ancestors)
        filler = np.full((count, self.heads * dim), 9, np.float32)
        out = upload(self.device, filler, dtype)
        qkv_on_device = upload(self.device, qkv.reshape(count, -1))
        attention = self.kernels.attention
        plan = attention.plan(lane, rows, self.kv, self.heads)
        attention.attend(lane, qkv_on_device, plan, self.kv, 1, out)
        return out

    def on_stream(self, stream, *args, **more):
        """Run attention on a stream and return the result on the host."""
        return download(stream, self.run(StreamLane(stream), *args, **more))

    def wanted(self, slot, position):
        """Compute the attention of one row in float64."""
        count = position + 1
        key = self.key[slot, :count].astype(np.float64)
        value = self.value[slot, :count].astype(np.float64)
        query = self.query[slot, position:count]
        mask = np.ones((1, count), bool)
        return numpy_llama.attention(query, key, value, mask)[0]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "run"),
    [
        (2, 2, 64, "float16", 16),
        (18, 1, 64, "bfloat16", 3),
        (4, 2, 128, "bfloat16", 2),
        (4, 1, 64, "bfloat16", 64),
        (3, 3, 128, "float16", 64),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (16, 2, 128, "bfloat16", 2),
                (4, 1, 64, "bfloat16", 4),
                (6, 2, 64, "bfloat16", 5),
                (5, 1, 128, "float16", 16),
                (18, 1, 64, "bfloat16", 64),
            )
        ),
    ],
)
@pytest.mark.full("3-3-128-float16-64")
def test_split_attention_equals_causal_softmax(device, stream, heads, kv_heads, dim, dtype, run):
    """Rows at the boundaries of the kernel's loops are correct; padding rows give zeros.

    The cases have 1 to 18 query heads per KV head, both head sizes and both dtypes. With 64 rows
    per slot, a tile has several query tiles.
    """
    case = Case(device, heads, kv_heads, dim, dtype)
    slots = [0, 0, 0, 1, 1, -1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 0]
    positions = [0, 15, 16, 63, 64, 5, 255, 256, -1, 257, 599, 511, 512, 10**6, 31, 271]
    got = case.on_stream(stream, slots, positions, run)
    for r, (s, p) in enumerate(zip(slots, positions, strict=True)):
        is_live = s >= 0 and 0 <= p < 600
        wanted = case.wanted(s, p) if is_live else np.zeros(heads * dim)
        np.testing.assert_allclose(got[r], wanted, atol=3e-5, err_msg=f"row {r}")


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        (64, "bfloat16"),
        (128, "float16"),
        (96, "bfloat16"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((64, "float16"), (128, "bfloat16"), (96, "float16"))
        ),
    ],
)
def test_attention_output_of_16_bits_is_rounded_float_output(device, stream, dim, dtype):
    """A 16-bit output has the bits of the float32 output, rounded to nearest even.

    The rows have one split, several splits or are padding. Heads of 96 elements do not run on
    tensor cores.
    """
    case = Case(device, heads=2, dim=dim, length=300)
    rows = [0, 0, 1, -1, 1], [3, 299, 64, 5, 255]
    wanted = upload(device, case.on_stream(stream, *rows, run=5), dtype).to_host()
    out = case.run(StreamLane(stream), *rows, run=5, dtype=dtype)
    stream.synchronize()
    assert (out.to_host() == wanted).all() and wanted.any()


def test_split_attention_reuses_parts_for_long_rows(device, stream):
    """A row with more than PARTS splits is correct, although each part then has several splits."""
    case = Case(device, heads=2, length=33 * SPLIT + 40, page=64)
    positions = [32 * SPLIT - 1, 32 * SPLIT, 33 * SPLIT + 39]
    got = case.on_stream(stream, 1, positions, run=3)
    wanted = [case.wanted(1, p) for p in positions]
    np.testing.assert_allclose(got, wanted, atol=3e-5)
    alone = case.on_stream(stream, 1, positions[1:2])
    assert same_bits(got[1], alone[0])


def make_plan(device, stream, slots, positions, heads=32, kv_heads=8, length=600):
    """Make an attention plan. Return its tiles, and a list of (tile, part) per block."""
    kv = PagedKV(
        device,
        layers=1,
        pages=1,
        page_size=64,
        kv_heads=kv_heads,
        head_dim=64,
        dtype="bfloat16",
        slots=max(slots) + 1,
        max_pages_per_slot=-(-length // 64),
    )
    rows = make_rows(device, [0] * len(slots), slots, positions)
    plan = ModelKernels(device, "warp").attention.plan(StreamLane(stream), rows, kv, heads)
    tiles = download(stream, plan.tiles)
    begin = [tuple(item) for item in plan.begin.to_host()[: plan.blocks + 1]]
    ends = begin[1:]
    work = [[] for _ in range(plan.blocks)]
    for b, (at, end) in enumerate(zip(begin, ends, strict=False)):
        while at < end:
            work[b].append(at)
            tile, part = at
            last = max(positions[slice(tiles[tile][0], tiles[tile][0] + tiles[tile][1])])
            parts = min(last // SPLIT + 1, 32) if slots[tiles[tile][0]] >= 0 and last >= 0 else 1
            at = (tile, part + 1) if part + 1 < parts else (tile + 1, 0)
    return tiles, work


def splits_of(tile, part, slots, positions):
    """Return the number of splits in a part of a plan's tile."""
    last = max(positions[tile[0] : tile[0] + tile[1]])
    if slots[tile[0]] < 0 or last < 0:
        return 1
    return len(range(part, last // SPLIT + 1, 32))


@pytest.mark.parametrize("seed", range(4))
def test_attention_plan_assigns_each_part_once(device, stream, seed):
    """Tiles have rows of one slot, and all parts of all tiles are assigned to blocks, in order.

    Requests have different numbers of rows, and some rows are padding.
    """
    rng = np.random.default_rng(seed)
    slots, positions = [], []
    for slot in rng.permutation(40)[: rng.integers(1, 40)].tolist():
        rows = int(rng.integers(1, 20))
        first = int(rng.integers(0, 600 - rows))
        is_padding = rng.random() < 0.2
        slots += [-1 if is_padding else slot] * rows
        positions += [-1] * rows if is_padding else range(first, first + rows)
    heads, kv_heads = [(32, 8), (4, 1), (7, 7), (18, 1)][seed]
    tiles, work = make_plan(device, stream, slots, positions, heads, kv_heads)
    group = heads // kv_heads
    tile_rows = 16 // min(group, -(-group // 2) if group > 16 else group)

    wanted = []  # rows of each tile
    for r, slot in enumerate(slots):
        if wanted and slot == slots[r - 1] and len(wanted[-1]) < tile_rows:
            wanted[-1].append(r)
        else:
            wanted.append([r])
    tiles = tiles[: len(wanted)].tolist()
    assert [[*range(tile[0], tile[0] + tile[1])] for tile in tiles] == wanted
    parts = []
    for t, rows in enumerate(wanted):
        last = max(positions[r] for r in rows)
        parts += [(t, part) for part in range(min(max(last, 0) // SPLIT + 1, 32))]
    assert [item for block in work for item in block] == parts
    for t, tile in enumerate(tiles):
        blocks = [b for b, block in enumerate(work) if any(item[0] == t for item in block)]
        assert tile[2:] == [blocks[0], len(blocks)]


def test_attention_plan_balances_long_and_short_contexts(device, stream):
    """One request with 32k positions among 63 with 1k: no block has 1.3 times the mean."""
    slots = [*range(64)]
    positions = [1023] * 64
    positions[40] = 32767
    tiles, work = make_plan(device, stream, slots, positions, length=32768)
    splits = [
        sum(splits_of(tiles[t], part, slots, positions) for t, part in block) for block in work
    ]
    assert sum(splits) == 512 + 63 * 16
    assert max(splits) <= 1.3 * sum(splits) / len(splits)


@pytest.mark.parametrize("heads", [1, pytest.param(4, marks=pytest.mark.full)])
def test_split_attention_is_row_invariant(device, stream, monkeypatch, heads):
    """The result of a row is the same, bit for bit, alone, in prefill chunks and in mixed batches.

    Mixed batches contain rows of both slots, so their actual number of rows per slot differs from
    `rows_per_slot`. A block computes some parts of a tile or several tiles.
    """
    case = Case(device, heads, length=320)
    alone = {}
    for s, middle in enumerate((range(122, 134), (127, 128, 132))):
        for p in (0, 15, 16, 35, *middle, 319):
            alone[s, p] = case.on_stream(stream, s, [p])[0]

    def check(slots, positions, run):
        got = case.on_stream(stream, slots, positions, run)
        slots = np.broadcast_to(slots, len(got))
        for row, s, p in zip(got, slots, positions, strict=True):
            if (s, p) in alone:
                assert same_bits(row, alone[s, p]), (s, p, run)

    for start, count in ((0, 40), (90, 48), (113, 33), (127, 2), (122, 7)):
        check(0, range(start, start + count), count)
    rng = np.random.default_rng(5)
    known = list(alone)
    for run in (1, 24):
        order = rng.permutation(len(known))[:24]
        shuffled = np.array([known[i] for i in order])
        check(shuffled[:, 0], shuffled[:, 1], run)
    for blocks, run in ((1, 64), (7, 4), (7, 64), (10**6, 4)):
        monkeypatch.setattr(attention, "_BLOCKS", {1: blocks, 4: blocks})
        check(1, [319, 127, 128, 132], 4)
        check(shuffled[:12, 0], shuffled[:12, 1], run)
        check(0, range(122, 134), run)


@pytest.mark.skipif(model_util.FORMS[0] != "thread" or "avx512bw" not in CPU, reason="no AVX-512")
@pytest.mark.parametrize(
    ("dim", "dtype"), [pytest.param(64, "bfloat16", marks=pytest.mark.full), (36, "float16")]
)
def test_thread_kernels_are_bit_identical_for_all_register_widths(
    device, stream, monkeypatch, dim, dtype
):
    """The linear and attention kernels give the same bits with and without 64-byte registers.

    The attention kernel processes prompts, rows of draft trees and padding rows. The linear kernel
    processes every number of rows for which it selects a different tile size.
    """
    x = np.random.default_rng(dim).standard_normal((25, 100)).astype(np.float32)
    weights = [rounded(np.resize(x, (columns, 100)), dtype) for columns in (7, 130)]

    def results():
        case = Case(device, heads=6, kv_heads=2, dim=dim, dtype=dtype, length=150)
        case.kernels = ModelKernels(device, "thread")
        positions = [*range(90, 130), *range(9, 29), 3, 149]
        slots = [0] * 40 + [1] * 20 + [-1, 1]
        paths = [0] * 60 + [0, 0b1011]
        yield case.on_stream(stream, slots, positions, run=40, paths=paths)
        for weight in weights:
            for rows in (1, 2, 3, 4, 6, 8, 12, 25):
                out = device.zeros((rows, len(weight)), "float32")
                x_on_device = upload(device, x[:rows])
                weight_on_device = upload(device, weight, dtype)
                case.kernels.products.linear(StreamLane(stream), x_on_device, weight_on_device, out)
                yield download(stream, out)

    wide = list(results())
    load = type(device).load

    def load_narrow(self, path, defines):
        return load(self, path, {**defines, "WIDE": 0})

    monkeypatch.setattr(type(device), "load", load_narrow)
    for one, other in zip(wide, results(), strict=True):
        assert same_bits(one, other)


def test_split_attention_is_bit_identical_for_any_page_size_and_in_graphs(device, stream):
    """Page sizes 1, 16 and 512 give the same bits on a stream and in a graph.

    One graph is launched twice. After the launches the counters that detect the last block of a
    tile are zero again.
    """
    results = []
    for page in (1, 16, 512):
        case = Case(device, page=page)
        results.append(case.on_stream(stream, 1, [3, 254, 255, 256, 599], run=5))
        graph = Graph(device, "attention")
        out = case.run(graph.lane("model"), 1, [3, 254, 255, 256, 599], run=2)
        executable = graph.instantiate()
        for _ in range(2 if page == 16 else 1):
            out.copy_from(np.zeros(out.shape, np.float32))
            executable.launch(stream)
            executable.synchronize()
            results.append(out.to_host())
        assert not case.kernels.attention._counters.to_host().any()
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize("base", [13, 58, 250])
@pytest.mark.full("13", "250")
def test_split_attention_tree_rows_equal_chain_rows(device, stream, base):
    """A row of a draft tree has the same bits as a row of a chain with the same tokens.

    The keys and values of draft 2, which is not an ancestor of any other draft, and of the
    positions after the tree are NaN and infinity. They must not affect rows that do not attend to
    them.
    """
    rng = np.random.default_rng(base)
    case = Case(device)
    parent = [-1, 0, 0]
    while len(parent) < 24:  # draft 2 gets no children
        candidates = [i for i in range(len(parent)) if i != 2]
        parent.append(int(rng.choice(candidates)))
    tree = Tree(tuple(range(24)), tuple(parent))
    depth = [len(tree.nodes(j)) for j in range(24)]
    paths = [tree.route(j) for j in range(24)]
    keys = case.key.copy()
    values = case.value.copy()
    keys[0, base + 2] = np.nan
    values[0, base + 2] = np.inf
    keys[0, base + 24 :] = np.inf
    values[0, base + 24 :] = np.nan
    case.fill(keys, values)
    queries = case.query[0, base : base + 24]
    got = case.on_stream(stream, 0, base + np.array(depth), 12, paths, queries)
    assert np.isnan(got[2]).all()
    for j in {*range(24)} - {2}:
        path = tree.nodes(j)
        chain_keys = keys.copy()
        chain_values = values.copy()
        chain = slice(base + 1, base + 1 + len(path))
        on_path = base + np.array(path, int)
        chain_keys[0, chain] = keys[0, on_path]
        chain_values[0, chain] = values[0, on_path]
        case.fill(chain_keys, chain_values)
        alone = case.on_stream(stream, 0, [base + depth[j]], queries=queries[j : j + 1])
        assert np.isfinite(alone).all(), j
        assert same_bits(got[j], alone[0]), j


@pytest.mark.parametrize("run", [8, 64])
def test_attention_nan_in_later_row_does_not_affect_earlier_rows(device, stream, run):
    """A NaN value at position 264 leaves the rows at positions 260 to 263 of its tile unchanged."""
    case = Case(device)
    wanted = case.on_stream(stream, 0, range(260, 268), run)
    values = case.value.copy()
    values[0, 264:] = np.nan
    case.fill(values=values)
    got = case.on_stream(stream, 0, range(260, 268), run)
    assert same_bits(got[:4], wanted[:4])
    assert np.isnan(got[4:]).all()


@pytest.mark.parametrize("dim", [32, 64])
def test_attention_nan_key_gives_nan(device, stream, dim):
    case = Case(device, dim=dim)
    keys = case.key.copy()
    keys[0, 264] = np.nan
    case.fill(keys=keys)
    got = case.on_stream(stream, 0, range(260, 268), run=8)
    assert np.isfinite(got[:4]).all() and np.isnan(got[4:]).all()


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "arch", [90, *(pytest.param(arch, marks=pytest.mark.full) for arch in (80, 100, 120))]
)
@pytest.mark.parametrize("dim", ["64", "128"])
@pytest.mark.parametrize(
    ("kernel", "threads", "blocks", "static_limit"),
    [
        ("attention_split", 128, 2, 48 * 1024),
        ("attention_prompt", 256, 1, attention._STATIC_SHARED),
    ],
)
def test_split_attention_fits_blocks_per_multiprocessor(
    arch, dim, kernel, threads, blocks, static_limit
):
    """The blocks of a multiprocessor fit in its registers, and the loops over steps spill none.

    Up to six values, which these loops do not use, may be in local memory.
    """
    variant = Variant(FOLDER / f"{kernel}.cu", (("WIDE_HEAD", dim),))
    (usage,) = compile_variant(variant, arch)
    assert usage.stack_bytes <= 6 * 4 and usage.loop["local"] == 0
    assert usage.registers * threads * blocks <= 65536
    assert usage.shared_bytes <= static_limit
