"""Attention over a paged KV cache: QKV projection, RoPE, attention, and compaction of the cache.

Attention runs on tensor cores (*split attention*) if the kernels are loaded in the form ``warp``,
as on all GPUs (`KernelLoader`), the KV cache has 16 bits, and heads have 64 or 128 elements. A
kernel makes a plan once per forward pass, and the plan divides the work of split attention among
blocks. All calls share the plan's memory and a workspace, so the calls must run in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.lanes import Lane
from graft.models.cache.kv import STORAGE, PagedKV
from graft.models.llm.kernels.loader import KernelLoader, ceil_div
from graft.models.llm.kernels.norms import Norms
from graft.models.llm.kernels.operands import HeadNorms, KVWrite, Norm
from graft.models.llm.kernels.products import Products
from graft.models.llm.kernels.tensor_cores import MULTIPROCESSORS
from graft.models.llm.rows import Rows
from graft.models.llm.weights import Interleave, Matrix
from graft.sampling.checks import expect

# All sizes except _THREAD_BLOCKS and _BLOCKS must match constants in the kernels.
_WARP = 32
_WARP_BLOCK = 128
_PROMPT_BLOCK = 256
_TILE = 16
_THREAD_QUERIES = 48
_THREAD_BLOCKS = 8  # few rows are divided among this many blocks, to use several CPU threads
_SPLIT = 64  # minimum number of positions per part
_MAX_PARTS = 32
# If a slot has _PROMPT_ROWS rows or more, _QUERY_TILES query tiles share keys and values: attention
# runs the kernel attention_prompt instead of attention_split.
_QUERY_TILES = 4
_PROMPT_ROWS = 64
_PROMPT_STAGES = 3  # stages of the pipeline of attention_prompt
_STATIC_SHARED = 6 * 1024  # more than the static shared memory of attention_prompt
# Number of blocks of split attention that run at the same time, by number of query tiles.
_BLOCKS = {1: 2 * MULTIPROCESSORS, _QUERY_TILES: MULTIPROCESSORS}


@dataclass(frozen=True)
class AttentionPlan:
    """The rows of a forward pass, and how the blocks of split attention divide the work on them.

    Attributes
    ----------
    rows
        Rows of the pass.
    heads
        Number of query heads.
    query_tiles
        Number of query tiles (tensor-core tiles of 16 queries) into which the queries of one entry
        of `tiles` and one head tile are divided. If it is 0, attention runs without tensor cores,
        and the attributes below are not set.
    blocks
        Number of blocks that divide the work on one head tile among themselves.
    head_tiles
        Number of head tiles, that is, groups of query heads that one block computes together.
    tiles
        The rows, divided into ranges of consecutive rows of one slot (``PlanTile`` in
        attention_plan.cuh).
    begin
        Where the work of each block begins (``PlanBegin`` in attention_plan.cuh).
    """

    rows: Rows
    heads: int
    query_tiles: int = 0
    blocks: int = 0
    head_tiles: int = 0
    tiles: DeviceArray | None = None
    begin: DeviceArray | None = None


class Attention:
    """Attention kernels and the kernels that write and move KV cache entries."""

    def __init__(self, loader: KernelLoader, products: Products, norms: Norms) -> None:
        self._loader = loader
        self._products = products
        self._norms = norms
        # Workspace of split attention: partial results, and counters that each launch resets to 0.
        self._partials: DeviceArray | None = None
        self._counters: DeviceArray | None = None
        # Plan of the current forward pass.
        self._tiles: DeviceArray | None = None
        self._begin: DeviceArray | None = None

    def qkv_interleave(self, head_dim: int, head_norm: bool) -> Interleave:
        """Return the function with which `Weights.stacked` lays out the rows of a QKV projection.

        A kernel that computes both the projection and RoPE needs the two halves of each head's rows
        interleaved. With `head_norm`, the heads are normalized between projection and RoPE, so that
        no such kernel is used.
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

    def plan(self, lane: Lane, rows: Rows, kv: PagedKV, heads: int) -> AttentionPlan:
        """Return the plan of a forward pass over `rows`, for all its calls of `attend`.

        For split attention, add the kernel that writes the plan to the lane. All plans use the same
        memory, so a plan is valid until the next call.
        """
        if not self.reserve(rows.count, heads, kv):
            return AttentionPlan(rows, heads)
        tile_heads, head_tiles = _head_tiles(heads, kv)
        # For trees, use the kernel for few rows, whose small tiles occupy more blocks. Most steps
        # are computed row by row (attention_step.cuh), which more blocks do faster.
        rows_per_slot = rows.rows_per_slot if rows.ancestors is None else 1
        query_tiles = self._query_tiles(rows_per_slot, kv)
        tile_rows = query_tiles * (_TILE // tile_heads)
        blocks = _plan_blocks(rows.count, query_tiles, head_tiles, kv)
        assert self._tiles is not None and self._begin is not None
        plan = AttentionPlan(rows, heads, query_tiles, blocks, head_tiles, self._tiles, self._begin)
        kernel = self._loader.load("attention_plan", "attention_plan")
        sizes = (kv.slots, kv.max_pages, kv.page_shift, tile_rows, blocks)
        args = (rows.slot, rows.pos, rows.count, *sizes, plan.tiles, plan.begin)
        lane.kernel(kernel, 1, _WARP, args, shared=8 * rows.count, name="attention plan")
        return plan

    def attend(
        self,
        lane: Lane,
        qkv: DeviceArray,
        plan: AttentionPlan,
        kv: PagedKV,
        layer: int,
        out: DeviceArray,
    ) -> None:
        """Compute causal attention of each row over the KV cache of its slot.

        A row attends to the positions 0..pos of its slot. A row of a draft tree attends to the
        committed positions, to its ancestors in the tree and to itself. Padding rows give zeros.

        Parameters
        ----------
        qkv
            float32[R, (heads + 2 kv_heads) * head_dim], of which only the queries are read.
        plan
            The rows of the forward pass and the division of their work among blocks, from `plan`.
        out
            [R, heads * head_dim], float32 or `Products.input_dtype` of the product that reads it.
        """
        rows = plan.rows
        heads = plan.heads
        count = rows.count
        dim = kv.head_dim
        width = (heads + 2 * kv.kv_heads) * dim
        expect("attention: qkv", qkv, "float32", R=count, heads=width)
        out_dtype = "float32" if self._loader.is_thread else out.dtype
        expect("attention: out", out, out_dtype, R=count, heads=heads * dim)
        rows_args: tuple[object, ...] = (qkv, rows.slot, rows.pos, rows.ancestors)
        arrays = (kv.page_table, kv.k[layer], kv.v[layer], out)
        sizes = (kv.kv_heads, kv.slots, kv.max_pages, kv.page_shift, dim**-0.5)
        if plan.query_tiles > 1:  # attention_prompt does not support trees
            rows_args = rows_args[:-1]
        if plan.query_tiles:
            self._launch_split(lane, (*rows_args, *arrays, heads, *sizes), plan, kv, out)
        else:
            args = (*rows_args, *arrays, count, heads, *sizes)
            self._launch_unsplit(lane, args, count, kv, heads, out)

    def _launch_unsplit(
        self,
        lane: Lane,
        args: tuple[object, ...],
        count: int,
        kv: PagedKV,
        heads: int,
        out: DeviceArray,
    ) -> None:
        """Launch attention for `count` rows without tensor cores and without splitting the keys.

        One block computes all keys of a row. `args` are the first arguments of the kernel.
        """
        defines = {"CACHE": STORAGE[kv.dtype], "HEAD_DIM": kv.head_dim}
        if self._loader.is_thread:
            kernel = self._loader.load_form("attention", **defines)
            group = heads // kv.kv_heads
            queries = max(ceil_div(count * heads, _THREAD_BLOCKS), group)
            queries = min(queries, _THREAD_QUERIES)
            grid = (ceil_div(count * group, queries), kv.kv_heads, 1)
            lane.kernel(kernel, grid, 1, (*args, queries), name="attention")
        else:
            kernel = self._loader.load_form("attention", **defines, OUT=STORAGE[out.dtype])
            lane.kernel(kernel, (heads, count, 1), _WARP_BLOCK, args, name="attention")

    def _launch_split(
        self,
        lane: Lane,
        args: tuple[object, ...],
        plan: AttentionPlan,
        kv: PagedKV,
        out: DeviceArray,
    ) -> None:
        """Launch attention on tensor cores. `args` are the first arguments of the kernel."""
        is_prompt = plan.query_tiles > 1
        name = "attention_prompt" if is_prompt else "attention_split"
        defines = {"CACHE16": STORAGE[kv.dtype], "WIDE_HEAD": kv.head_dim}
        kernel = self._loader.load(name, name, **defines, OUT=STORAGE[out.dtype])
        tile_heads, _ = _head_tiles(plan.heads, kv)
        work = (tile_heads, plan.tiles, plan.begin, _parts(kv))
        grid = (plan.blocks, plan.head_tiles, 1)
        args = (*args, *work, self._partials, self._counters)
        block = _PROMPT_BLOCK if is_prompt else _WARP_BLOCK
        shared = _prompt_shared_bytes(kv) if is_prompt else 0
        lane.kernel(kernel, grid, block, args, shared=shared, name="attention")

    def _query_tiles(self, rows_per_slot: int, kv: PagedKV) -> int:
        """Return the number of query tiles (groups of 16 queries) that share keys and values.

        It is 1 if a slot has few rows, or if the GPU has too little shared memory for more.
        """
        limit = self._loader.device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        fits = _prompt_shared_bytes(kv) + _STATIC_SHARED <= limit
        return _QUERY_TILES if fits and rows_per_slot >= _PROMPT_ROWS else 1

    def reserve(self, rows: int, heads: int, kv: PagedKV) -> bool:
        """Reserve the workspace and the plan of split attention for up to `rows` rows.

        Return False if attention over this KV cache does not run on tensor cores and needs neither.
        """
        if self._loader.is_thread or kv.head_dim not in (64, 128) or kv.dtype == "float32":
            return False
        device = self._loader.device
        _, head_tiles = _head_tiles(heads, kv)
        for query_tiles in {1, self._query_tiles(_PROMPT_ROWS, kv)}:
            blocks = _plan_blocks(rows, query_tiles, head_tiles, kv)
            counters = blocks * head_tiles
            partials = counters * _parts(kv) * query_tiles * _TILE * (kv.head_dim + 4)
            if self._partials is None or self._partials.shape[0] < partials:
                self._partials = device.empty((partials,), "float32")
            if self._counters is None or self._counters.shape[0] < counters:
                self._counters = device.zeros((counters,), "int32")
            if self._begin is None or self._begin.shape[0] <= blocks:
                self._begin = device.empty((blocks + 1, 2), "int32")
        if self._tiles is None or self._tiles.shape[0] < rows:
            self._tiles = device.empty((rows, 4), "int32")
        return True

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


def _parts(kv: PagedKV) -> int:
    """Return the maximum number of parts into which split attention divides a row's positions."""
    return min(ceil_div(kv.positions, _SPLIT), _MAX_PARTS)


def _head_tiles(heads: int, kv: PagedKV) -> tuple[int, int]:
    """Return the number of query heads per tile, and the number of head tiles."""
    group = heads // kv.kv_heads
    tiles_per_group = ceil_div(group, _TILE)
    return ceil_div(group, tiles_per_group), kv.kv_heads * tiles_per_group


def _plan_blocks(rows: int, query_tiles: int, head_tiles: int, kv: PagedKV) -> int:
    """Return the number of blocks among which the tiles of `rows` rows are divided."""
    return max(1, min(_BLOCKS[query_tiles] // head_tiles, rows * _parts(kv)))


def _prompt_shared_bytes(kv: PagedKV) -> int:
    """Return the bytes of dynamic shared memory of the kernel attention_prompt."""
    step = 2 * _TILE * kv.head_dim * 2  # keys and values of 16 positions
    exchanged = 3 * _TILE * kv.head_dim * 4  # sums of three quarters of a query tile
    return _PROMPT_STAGES * 2 * step + _QUERY_TILES * exchanged
