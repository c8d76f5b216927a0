"""Attention over a paged KV cache: QKV projection, RoPE, attention, and compaction of the cache.

The ``warp`` form of the kernels runs attention on tensor cores if the KV cache has 16 bits and
heads have 64 or 128 elements. It then uses workspace that all calls share, so the calls must run in
order.
"""

from __future__ import annotations

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.lanes import Lane
from graft.models.cache.kv import STORAGE, PagedKV
from graft.models.llm.kernels.loader import KernelLoader, ceil_div
from graft.models.llm.kernels.norms import Norms
from graft.models.llm.kernels.operands import HeadNorms, KVWrite, Norm
from graft.models.llm.kernels.products import Products
from graft.models.llm.rows import Rows
from graft.models.llm.weights import Interleave, Matrix
from graft.sampling.checks import expect

# Block sizes. They must match the constants in the kernels.
_WARP_BLOCK = 128
_TILE = 16
_THREAD_QUERIES = 48
_THREAD_BLOCKS = 8  # few rows are divided among this many blocks, to use several CPU threads
_SPLIT = 64  # minimum positions per part of split attention
_MAX_PARTS = 32
_BLOCKS = 512  # approximate number of blocks that a GPU runs at the same time


class Attention:
    """Attention kernels and the kernels that write and move KV cache entries."""

    def __init__(self, loader: KernelLoader, products: Products, norms: Norms) -> None:
        self._loader = loader
        self._products = products
        self._norms = norms
        # Workspace of split attention: partial results, and counters that each launch resets to 0.
        self._partials: DeviceArray | None = None
        self._counters: DeviceArray | None = None

    def qkv_interleave(self, head_dim: int, head_norm: bool) -> Interleave:
        """Return the function for `Weights.stacked` that selects the layout of a QKV projection.

        The rows of each head are interleaved if one kernel can do all of `project_qkv`.
        """

        def group(dtype: str, rows: int, columns: int) -> int:
            fits = self._products.can_fuse_rope(head_dim, dtype, rows, columns)
            return head_dim if fits and not head_norm else 0

        return group

    def project_qkv(
        self,
        lane: Lane,
        x: DeviceArray | Norm,
        weight: Matrix,
        qkv: DeviceArray,
        write: KVWrite,
        head_norms: HeadNorms | None = None,
    ) -> None:
        """Compute queries, keys and values, apply RoPE, and write keys and values to the KV cache.

        If `head_norms` is None and `Products.can_fuse_rope` returns True, this is one kernel, which
        stores only the queries in `qkv`. Otherwise it is the sequence `Products.linear`,
        `Norms.head_norm` (if there are head norms, as in Qwen3) and `rope_and_store`.

        `x` is as in `Products.linear`. `weight` is [(heads + 2 kv_heads) * head_dim, inner], in the
        layout that `qkv_interleave` selects. `qkv` is float32[R, (heads + 2 kv_heads) * head_dim].
        """
        products = self._products
        dim = write.kv.head_dim
        if head_norms is None and products.can_fuse_rope(dim, weight.dtype, *weight.shape):
            products.fused_qkv(lane, x, weight, qkv, write)
            return
        products.linear(lane, x, weight, qkv, name="qkv")
        if head_norms is not None:
            self._norms.head_norm(lane, qkv, head_norms, write.heads)
        self.rope_and_store(lane, qkv, write)

    def rope_and_store(self, lane: Lane, qkv: DeviceArray, write: KVWrite) -> None:
        """Rotate queries (in place) and keys, and write keys and values to the KV cache.

        `qkv` is float32[R, (heads + 2 kv_heads) * head_dim].
        """
        kv = write.kv
        count = write.rows.count
        dim = kv.head_dim
        store_args = write.kernel_args(qkv)
        chunk = dim // 2 if self._loader.is_thread else 1
        kernel = self._loader.load(
            "rope", "rope_and_store", CACHE=STORAGE[kv.dtype], HEAD_DIM=dim, CHUNK=chunk
        )
        heads = write.heads + 2 * kv.kv_heads
        grid, block = self._loader.elementwise_launch(count * heads, dim // 2, chunk)
        lane.kernel(kernel, grid, block, (qkv, count, *store_args), name="rope, kv write")

    def attend(
        self,
        lane: Lane,
        qkv: DeviceArray,
        rows: Rows,
        kv: PagedKV,
        layer: int,
        heads: int,
        out: DeviceArray,
    ) -> None:
        """Compute causal attention of each row over the KV cache of its slot.

        A row attends to the positions 0..pos of its slot. A row of a draft tree attends to the
        committed positions, to its ancestors in the tree and to itself. Padding rows give zeros.

        Parameters
        ----------
        qkv
            float32[R, (heads + 2 kv_heads) * head_dim], of which only the queries are read.
        rows
            Slot, last visible position and ancestors of each row.
        out
            float32[R, heads * head_dim].
        """
        count = rows.count
        dim = kv.head_dim
        width = (heads + 2 * kv.kv_heads) * dim
        expect("attention: qkv", qkv, "float32", R=count, heads=width)
        expect("attention: out", out, "float32", R=count, heads=heads * dim)
        arrays = (rows.slot, rows.pos, rows.ancestors, kv.page_table, kv.k[layer], kv.v[layer], out)
        sizes = (count, heads, kv.kv_heads, kv.slots, kv.max_pages, kv.page_shift)
        args = (qkv, *arrays, *sizes, dim**-0.5)
        parts = self.reserve(count, heads, kv)
        if parts:
            self._launch_split(lane, args, rows, kv, heads, parts)
        else:
            self._launch_unsplit(lane, args, count, kv, heads)

    def _launch_unsplit(
        self, lane: Lane, args: tuple[object, ...], count: int, kv: PagedKV, heads: int
    ) -> None:
        """Launch attention without tensor cores for `count` rows."""
        defines = {"CACHE": STORAGE[kv.dtype], "HEAD_DIM": kv.head_dim}
        kernel = self._loader.load_form("attention", **defines)
        if self._loader.is_thread:
            group = heads // kv.kv_heads
            queries = max(ceil_div(count * heads, _THREAD_BLOCKS), group)
            queries = min(queries, _THREAD_QUERIES)
            grid = (ceil_div(count * group, queries), kv.kv_heads, 1)
            lane.kernel(kernel, grid, 1, (*args, queries), name="attention")
        else:
            lane.kernel(kernel, (heads, count, 1), _WARP_BLOCK, args, name="attention")

    def _launch_split(
        self, lane: Lane, args: tuple[object, ...], rows: Rows, kv: PagedKV, heads: int, parts: int
    ) -> None:
        """Launch attention on tensor cores.

        As in Flash-Decoding, the KV positions of a tile of queries are divided among several
        blocks, of which there are at most `parts`.
        """
        count = rows.count
        kernel = self._loader.load(
            "attention_split", "attention_split", CACHE16=STORAGE[kv.dtype], WIDE_HEAD=kv.head_dim
        )
        group = heads // kv.kv_heads
        tiles_per_group = ceil_div(group, _TILE)
        tile_heads = ceil_div(group, tiles_per_group)
        run = min(rows.rows_per_slot, count)
        tiles = ceil_div(count, run) * ceil_div(run, _TILE // tile_heads)
        head_tiles = kv.kv_heads * tiles_per_group
        blocks = _BLOCKS // (tiles * head_tiles)
        grid = (tiles, head_tiles, max(1, min(blocks, parts)))
        args = (*args, run, tile_heads, self._partials, self._counters)
        lane.kernel(kernel, grid, _WARP_BLOCK, args, name="attention")

    def reserve(self, rows: int, heads: int, kv: PagedKV) -> int:
        """Reserve the workspace of split attention for `rows` rows.

        Return the maximum number of parts into which the positions of a row are split; 0 for a KV
        cache whose attention does not run on tensor cores and needs no workspace.
        """
        if self._loader.is_thread or kv.head_dim not in (64, 128) or kv.dtype == "float32":
            return 0
        parts = min(ceil_div(kv.positions, _SPLIT), _MAX_PARTS)
        # A launch with more than `queries` queries has enough tiles for all blocks. One block then
        # processes all positions of a tile, so the launch needs no workspace for partial results.
        queries = min(rows * heads, _BLOCKS // 2 * _TILE)
        size = parts * queries * (kv.head_dim + 4)
        device = self._loader.device
        if parts > 1 and (self._partials is None or self._partials.shape[0] < size):
            self._partials = device.empty((size,), "float32")
        if self._counters is None or self._counters.shape[0] < rows * heads:
            self._counters = device.zeros((rows * heads,), "int32")
        return parts

    def compact(
        self,
        lane: Lane,
        kv: PagedKV,
        row_slot: DeviceArray,
        result: DeviceArray,
        features: DeviceArray | None,
        first: DeviceArray,
    ) -> None:
        """Move the KV entries of the accepted path of a draft tree to their sequence positions.

        Before verification, draft j of a tree is cached j positions after the root. All layers of
        the cache are compacted.

        Parameters
        ----------
        row_slot
            int32[B], slot of each batch row.
        result
            int32[B, row words], ``RoundRow`` of each batch row after verification, with the
            accepted drafts.
        features
            float32[R, columns], the target's features for the drafter. Their rows are moved like
            the KV entries. None if the drafter reads no features.
        first
            int32[B], first forward row of each batch row.
        """
        batch = row_slot.shape[0]
        item = kv.kv_heads * kv.head_dim
        kernel = self._loader.load("compact", "compact_cache", CACHE=STORAGE[kv.dtype])
        sizes = (kv.slots, kv.max_pages, kv.page_shift, item)
        layer = (kv.scratch_page + 1) * kv.page_size * item
        args = (kv.k, kv.v, layer, row_slot, result, result.shape[1], kv.page_table, *sizes)
        block = self._loader.element_block
        lane.kernel(kernel, (batch, kv.layers, 1), block, args, name="compact cache")
        if features is not None:
            expect("compact: first", first, "int32", B=batch)
            kernel = self._loader.load("compact", "compact_rows", CACHE=STORAGE[kv.dtype])
            row_args = (features, first, features.shape[1], row_slot, result, result.shape[1])
            lane.kernel(kernel, batch, block, row_args, name="compact features")
