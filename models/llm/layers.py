"""Layers as device work: each method adds one kernel to a lane, after checking named shapes.

Matrix and attention kernels exist in two forms, norms in two block sizes: "thread" (threads of
many outputs, barrier-free, which C++ compilers vectorise: the soft device alone) and "warp" (GPUs,
and the soft device in tests). A process uses one form. The forms differ in bits; within a form a
row's bits depend on that row alone.

Form "warp" multiplies on tensor cores where weights have 16 bits, or 8 that are made bfloat16 on
the way in, their inner size is a multiple of 128 and their outer one of 16. Activations, float32
elsewhere, are then rounded to the weights' type on the way in, as models are trained and served;
or, where `activations` is "float32", counted as two such numbers, the rounded one and what is left:
16 bits of mantissa with bfloat16, 22 with float16. Sums are float32.

Attention over caches of 16 bits and heads of 64 or 128 runs on tensor cores there too. Both have
workspace that all calls share: all work of one `Layers` must be ordered.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from graft.cudagraph.device import Device
from graft.cudagraph.dtypes import E4M3, itemsize
from graft.cudagraph.errors import OptionError, ShapeError
from graft.cudagraph.kernels import Kernel
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.models.cache.kv import STORAGE, PagedKV
from graft.models.llm.rows import Rows
from graft.models.llm.weights import Matrix, ScaledMatrix
from graft.sampling.checks import expect

FOLDER = Path(__file__).resolve().parent / "kernels"
FORMS = {"soft": ("thread", "warp"), "cuda": ("warp",)}
ACTIVATIONS = ("rounded", "float32")

# Launch shapes; the kernels' own constants of the same meaning stand in models/kernels.
_THREAD_COLUMNS = 64
_THREAD_ROWS = 48
_THREAD_CHUNK = 64
_THREAD_QUERIES = 48
_THREAD_SHARES = 8  # of a few rows' attention, for several workers
_WARP_BLOCK = 128
_WARP_COLUMNS = 2 * _WARP_BLOCK // 32
_WARP_ROWS = 8
_MMA_BLOCK = 256
_MMA_CHUNK = 128
_MMA_COLUMNS = 16
_MMA_PARTS = 8
_MMA_OUTPUTS = 128
# By bytes of a weight and rows of a block; 64 inner indices each.
_MMA_STAGES = {1: {32: 5, 64: 6, 128: 4}, 2: {32: 3, 64: 4, 128: 3}}
GROUP = 16  # results whose squares are summed up
_MMA_FEW = 16  # most rows that weights stream past
_MMA_BLOCKS = 128  # sums of many rows are parted until there are so many blocks
_NORM_BLOCK = 256
_ELEMENT_BLOCK = 128
_TILE = 16
_SPLIT = 256
_PARTS = 32
_SPLIT_BLOCKS = 512  # about what a GPU runs at once


def _ceil(count: int, unit: int) -> int:
    return -(-count // unit)


class MmaShape(NamedTuple):
    """How a product on tensor cores is launched, see linear_mma.cuh."""

    kernel: str
    defines: dict[str, int]
    grid: tuple[int, int, int]
    shared: int = 0  # bytes, beside what the text declares
    partials: int = 0  # floats


def mma_shape(rows: int, columns: int, nbytes: int = 2) -> MmaShape:
    """The shape for so many rows, split ones counted twice, and weights of so many bytes; all
    shapes give the same bits."""
    if rows <= _MMA_FEW:
        return MmaShape("linear_few", {"TILES": _ceil(rows, 8)}, (columns // _MMA_COLUMNS, 1, 1))
    stages = _MMA_STAGES[nbytes]
    block = next((size for size in stages if rows <= size), max(stages))
    across = _ceil(columns, _MMA_OUTPUTS)
    down = _ceil(rows, block)
    splits = 1
    while splits < _MMA_PARTS and across * down * splits < _MMA_BLOCKS:
        splits *= 2
    partials = across * down * _MMA_PARTS * block * _MMA_OUTPUTS if splits > 1 else 0
    shared = stages[block] * (_MMA_OUTPUTS * nbytes + block * 2) * 64
    return MmaShape("linear_many", {"ROW_BLOCK": block}, (across, down, splits), shared, partials)


class Norm(NamedTuple):
    """An RMS norm of rows, for a product that reads them.

    Attributes
    ----------
    weight, eps : float32[width], and what is added to the mean square.
    out : [R, width], of the dtype that the product reads.
    squares : None, or float32[R, width / 16] where products fold the norm: who writes the rows
        leaves them in `out` times `weight` alone, and sums of their squares here; who reads them
        divides by the root.
    """

    weight: DeviceArray
    eps: float
    out: DeviceArray
    squares: DeviceArray | None = None


class Layers:
    """The kernels of one device in one form.

    Parameters
    ----------
    form : "thread", the soft device's own, or "warp"; by default what suits the device.
    activations : "rounded" or "float32", see above.

    All work of one object must be ordered: it has sums of its own that calls share.
    """

    def __init__(
        self, device: Device, form: str | None = None, activations: str = "rounded"
    ) -> None:
        self.device = device
        forms = FORMS[device.kind]
        self.form = form or forms[0]
        if self.form not in forms:
            raise OptionError(f"form {form!r}, expected one of {forms} on a {device.kind} device")
        if activations not in ACTIVATIONS:
            raise OptionError(f"activations {activations!r}, expected one of {ACTIVATIONS}")
        self.activations = activations
        # Held: a module that no graph holds would be unloaded after each launch of a prefill.
        self._kernels: dict[tuple, Kernel] = {}
        self._partials: dict[str, DeviceArray] = {}
        # Of attention: parts of rows' sums, and counts that every kernel leaves zero.
        self._parts: DeviceArray | None = None
        self._arrived: DeviceArray | None = None

    @property
    def _thread(self) -> bool:
        return self.form == "thread"

    def _kernel(self, file: str, name: str, **defines: object) -> Kernel:
        key = (file, name, *defines.items())
        if (found := self._kernels.get(key)) is None:
            found = self.device.load(FOLDER / f"{file}.cu", defines)[name]
            self._kernels[key] = found
        return found

    def _formed(self, name: str, **defines: object) -> Kernel:
        return self._kernel(f"{name}_{self.form}", f"{name}_{self.form}", **defines)

    def _elements(self, rows: int, width: int, chunk: int) -> tuple[int, int]:
        """Grid and block of an elementwise kernel whose threads take `chunk` elements."""
        block = 8 if self._thread else _ELEMENT_BLOCK
        return _ceil(rows * _ceil(width, chunk), block), block

    @property
    def _chunk(self) -> int:
        return _THREAD_CHUNK if self._thread else 1

    @property
    def _norm_block(self) -> int:
        return 1 if self._thread else _NORM_BLOCK

    def norm(
        self, lane: Lane, x: DeviceArray, weight: DeviceArray, eps: float, out: DeviceArray
    ) -> None:
        """RMSNorm of rows: x float32[R, width], weight float32[width], out [R, width], float32 or
        what `input_dtype` names."""
        rows, width = x.shape
        expect("norm: x", x, "float32", R=rows, width=width)
        expect("norm: weight", weight, "float32", width=width)
        expect("norm: out", out, out.dtype, R=rows, width=width)
        args = (x, weight, out, rows, width, eps)
        kernel = self._kernel(
            "norm", "norm_rows", WEIGHT="float", OUT=_storage(out), NORM_THREADS=self._norm_block
        )
        lane.kernel(kernel, rows, self._norm_block, args, name="norm")

    def head_norm(
        self,
        lane: Lane,
        qkv: DeviceArray,
        weights: tuple[DeviceArray, DeviceArray],
        heads: int,
        eps: float,
    ) -> None:
        """RMSNorm of each query and key in place: qkv float32[R, (heads + 2 kv_heads) * D].

        Parameters
        ----------
        weights : float32[D] of queries, and of keys.
        """
        (rows, width), dim = qkv.shape, weights[0].shape[0]
        kv_heads = (width // dim - heads) // 2
        expect("head norm: qkv", qkv, "float32", R=rows, width=(heads + 2 * kv_heads) * dim)
        for weight in weights:
            expect("head norm: weight", weight, "float32", D=dim)
        block = 1 if self._thread else 32
        kernel = self._kernel("norm", "head_norm", WEIGHT="float", NORM_THREADS=block)
        args = (qkv, *weights, rows, heads, kv_heads, dim, eps)
        lane.kernel(kernel, rows * (heads + kv_heads), block, args, name="head norm")

    def input_dtype(self, weight: Matrix) -> str:
        """What `linear` reads fastest, with the bits of float32: as it would round that itself."""
        rounds = self.activations == "rounded" and self.gates(weight.dtype, *weight.shape)
        return _multiplied(weight.dtype) if rounds else "float32"

    def gates(self, dtype: str, columns: int, inner: int) -> bool:
        """Whether products with such a weight run on tensor cores, and may be gated."""
        fits = inner % _MMA_CHUNK == 0 and columns % _MMA_COLUMNS == 0
        return not self._thread and fits and dtype != "float32"

    def folds(self, weight: Matrix, reader: Matrix) -> bool:
        """Whether a norm between products with these weights takes no kernel of its own, see
        `Norm`. Of float16, which rows without their norm may leave, it does."""
        return getattr(weight, "sums", None) is None and all(
            array.dtype != "float16" and self.gates(array.dtype, *array.shape)
            for array in (weight, reader)
        )

    def turns(self, head_dim: int, dtype: str, columns: int, inner: int) -> bool:
        """Whether a product with such a weight turns its heads and fills the cache, see `heads`."""
        return head_dim % _MMA_COLUMNS == 0 and self.gates(dtype, columns, inner)

    def heads(
        self,
        lane: Lane,
        x: DeviceArray | Norm,
        weight: Matrix,
        qkv: DeviceArray,
        turn: DeviceArray,
        rows: Rows,
        kv: PagedKV,
        layer: int,
        heads: int,
        norms: tuple[DeviceArray, DeviceArray] | None,
        eps: float,
    ) -> None:
        """Queries, keys and values: `linear`, `head_norm` where there are `norms`, and
        `rope_and_store`; without norms in one kernel, of a weight that `turns` and was woven by
        heads (`Weights.stacked`). Then only queries are left in `qkv`."""
        if norms is None and self.turns(kv.head_dim, weight.dtype, *weight.shape):
            turned = kv, self._place(qkv, turn, rows, kv, layer, heads)
            self.linear(lane, x, weight, qkv, turned=turned, name="qkv")
            return
        self.linear(lane, x, weight, qkv, name="qkv")
        if norms is not None:
            self.head_norm(lane, qkv, norms, heads, eps)
        self.rope_and_store(lane, qkv, turn, rows, kv, layer, heads)

    def linear(
        self,
        lane: Lane,
        x: DeviceArray | Norm,
        weight: Matrix,
        out: DeviceArray,
        *,
        residual: DeviceArray | None = None,
        tap: tuple[DeviceArray, int] | None = None,
        norm: Norm | None = None,
        gated: bool = False,
        turned: tuple[PagedKV, tuple[object, ...]] | None = None,
        name: str = "linear",
    ) -> None:
        """out = x W^T, plus `residual` where given (which may be `out`).

        Parameters
        ----------
        x : [R, inner], float32 or what `input_dtype` says; or a norm of such.
        weight : [columns, inner], float32, float16, bfloat16 or E4M3 without NaN; where rows have
            scales, sums are multiplied by them before anything else. Of one with `sums` the
            products of all ranks are added up in their order, and then the residual.
        out, residual : float32[R, columns].
        tap : a second copy of the result goes to float32[R, stride] from this column on.
        norm : of the result, for who reads it.
        gated : out [R, columns / 2] of any dtype is silu(gate) * up instead, of a weight that
            `gates` and was woven (`Weights.stacked`).
        turned : what `heads` asks for.
        """
        if isinstance(weight, ScaledMatrix) and weight.sums is not None:
            own = weight.sums.local_buffer(*out.shape)
            self.linear(lane, x, ScaledMatrix(weight.values, weight.scale), own, name=name)
            self._add_parts(lane, weight.sums.all_gather(lane, own), residual, out, tap)
            if norm is not None:
                self.norm(lane, out, norm.weight, norm.eps, norm.out)
            return
        squares, x_eps = (x.squares, x.eps) if isinstance(x, Norm) else (None, 0.0)
        x = x.out if isinstance(x, Norm) else x
        rows, inner = x.shape
        columns = weight.shape[0]
        scale = None
        rounded = x.dtype == self.input_dtype(weight) != "float32"
        if isinstance(weight, ScaledMatrix):
            scale = weight.scale
            weight = weight.values
        if scale is not None:
            expect(f"{name}: scale", scale, "float32", columns=columns)
        expect(f"{name}: weight", weight, weight.dtype, columns=columns, inner=inner)
        expect(f"{name}: x", x, x.dtype if rounded else "float32", R=rows, inner=inner)
        expect(
            f"{name}: out", out, out.dtype if gated else "float32", R=rows, columns=columns >> gated
        )
        folded = norm if norm is not None and norm.squares is not None else None
        cores = self.gates(weight.dtype, columns, inner)
        if (gated or turned or folded or squares) and not cores:
            raise ShapeError(
                f"{name}: a product of {weight.dtype}[{columns}, {inner}] in the form "
                f"{self.form} cannot be gated, turned or fold a norm"
            )
        if (gated or turned) and (residual or tap or norm):
            raise ShapeError(f"{name}: gated or turned, with a residual, a tap or a norm")
        if squares is not None:
            expect(f"{name}: squares of x", squares, "float32", R=rows, groups=inner // GROUP)
        if folded is not None and folded.squares is not None:
            expect(f"{name}: norm", folded.weight, "float32", columns=columns)
            expect(f"{name}: normed", folded.out, self.input_dtype(weight), R=rows, columns=columns)
            expect(f"{name}: squares", folded.squares, "float32", R=rows, groups=columns // GROUP)
        if residual is not None:
            expect(f"{name}: residual", residual, "float32", R=rows, columns=columns)
        target, offset = tap if tap is not None else (None, 0)
        stride = target.shape[1] if target is not None else 0
        if target is not None:
            expect(f"{name}: tap", target, "float32", R=rows, stride=stride)
            if offset < 0 or offset + columns > stride:
                raise ShapeError(
                    f"{name}: tap columns {offset}..{offset + columns} outside stride={stride}"
                )
        args = (weight, scale, x, residual, out, target, rows, columns, inner, offset, stride)
        if cores:
            types = {
                "WEIGHT16": STORAGE[_multiplied(weight.dtype)],
                "X16": int(rounded),
                "WEIGHT8": int(weight.dtype == E4M3),
                "GATED": int(gated),
                "OUT": _storage(out),
            }
            kv, place = turned or (None, (*(None,) * 7, *(0,) * 6))
            if kv is not None:
                types |= {"TURNED": kv.head_dim, "CACHE": STORAGE[kv.dtype]}
            ending = (folded.weight, folded.out, folded.squares) if folded else (None,) * 3
            shape = mma_shape(rows << self._split, columns, itemsize(weight.dtype))
            self._linear_mma(lane, shape, types, (*args, squares, x_eps, *ending, *place), name)
        else:
            grid = (_ceil(columns, _WARP_COLUMNS), _ceil(rows, _WARP_ROWS), 1)
            block = _WARP_BLOCK
            if self._thread:
                grid = (_ceil(columns, _THREAD_COLUMNS), _ceil(rows, _THREAD_ROWS), 1)
                block = 1
            kernel = self._formed("linear", WEIGHT=_storage(weight))
            lane.kernel(kernel, grid, block, args, name=name)
        if norm is not None and not folded:
            self.norm(lane, out, norm.weight, norm.eps, norm.out)

    def _add_parts(
        self,
        lane: Lane,
        parts: DeviceArray,
        residual: DeviceArray | None,
        out: DeviceArray,
        tap: tuple[DeviceArray, int] | None,
    ) -> None:
        """out = the sum of parts float32[ranks, R, columns], in their order; and as `linear`."""
        ranks, rows, width = parts.shape
        grid, block = self._elements(rows, width, self._chunk)
        target, offset = tap if tap is not None else (None, 0)
        stride = target.shape[1] if target is not None else 0
        kernel = self._kernel("elements", "add_parts", WEIGHT="float", CHUNK=self._chunk)
        args = (parts, residual, out, target, ranks, rows, width, offset, stride)
        lane.kernel(kernel, grid, block, args, name="sum of ranks")

    @property
    def _split(self) -> int:
        return int(self.activations == "float32")

    def _linear_mma(self, lane: Lane, shape: MmaShape, types: dict, args: tuple, name: str) -> None:
        """On tensor cores, in a shape that suits so many rows."""
        kernel = self._kernel(
            shape.kernel, shape.kernel, SPLIT=self._split, **types, **shape.defines
        )
        if shape.kernel == "linear_many":
            partials = self._shared("float32", shape.partials)
            args = (*args, partials, self._shared("int32", shape.grid[0] * shape.grid[1]))
        lane.kernel(kernel, shape.grid, _MMA_BLOCK, args, shared=shape.shared, name=name)

    def _shared(self, dtype: str, size: int) -> DeviceArray | None:
        """Zeros at first, and whatever the calls before have left."""
        if size and (dtype not in self._partials or self._partials[dtype].shape[0] < size):
            self._partials[dtype] = self.device.zeros((size,), dtype)
        return self._partials[dtype] if size else None

    def rope_and_store(
        self,
        lane: Lane,
        qkv: DeviceArray,
        turn: DeviceArray,
        rows: Rows,
        kv: PagedKV,
        layer: int,
        heads: int,
    ) -> None:
        """Turn the queries of `qkv` in place; turn the keys and write both to the cache.

        Parameters
        ----------
        qkv : float32[R, (heads + 2 kv_heads) * head_dim]: queries, keys, values.
        turn : float32[positions, head_dim]: cosines, sines (`Rope.table`).
        """
        dim = kv.head_dim
        place = self._place(qkv, turn, rows, kv, layer, heads)
        chunk = dim // 2 if self._thread else 1
        kernel = self._kernel(
            "rope", "rope_and_store", CACHE=STORAGE[kv.dtype], HEAD_DIM=dim, CHUNK=chunk
        )
        grid, block = self._elements(rows.count * (heads + 2 * kv.kv_heads), dim // 2, chunk)
        lane.kernel(kernel, grid, block, (qkv, rows.count, *place), name="rope, kv write")

    @staticmethod
    def _place(
        qkv: DeviceArray, turn: DeviceArray, rows: Rows, kv: PagedKV, layer: int, heads: int
    ) -> tuple[object, ...]:
        """Kernel arguments: what turns heads of `qkv`, and where they go."""
        width = (heads + 2 * kv.kv_heads) * kv.head_dim
        expect("rope: qkv", qkv, "float32", R=rows.count, heads=width)
        expect("rope: table", turn, "float32", positions=kv.positions, head_dim=kv.head_dim)
        return (
            turn,
            rows.slot,
            rows.pos,
            rows.tree,
            kv.page_table,
            kv.k[layer],
            kv.v[layer],
            heads,
            kv.kv_heads,
            kv.slots,
            kv.max_pages,
            kv.page_shift,
            kv.scratch_page,
        )

    def attention(
        self,
        lane: Lane,
        qkv: DeviceArray,
        rows: Rows,
        kv: PagedKV,
        layer: int,
        heads: int,
        out: DeviceArray,
    ) -> None:
        """Each row's queries over positions 0..pos of its slot or path; padding rows give zeros.

        Parameters
        ----------
        qkv : float32[R, (heads + 2 kv_heads) * head_dim]; only the queries are read.
        out : float32[R, heads * head_dim].
        """
        count = rows.count
        dim = kv.head_dim
        expect("attention: qkv", qkv, "float32", R=count, heads=(heads + 2 * kv.kv_heads) * dim)
        expect("attention: out", out, "float32", R=count, heads=heads * dim)
        args = (qkv, rows.slot, rows.pos, rows.tree, kv.page_table, kv.k[layer], kv.v[layer], out)
        sizes = (count, heads, kv.kv_heads, kv.slots, kv.max_pages, kv.page_shift, dim**-0.5)
        parts = self.attention_parts(count, heads, kv)
        if parts:
            defines = {"CACHE16": STORAGE[kv.dtype], "WIDE_HEAD": dim}
            kernel = self._kernel("attention_split", "attention_split", **defines)
            stacked = _ceil(heads // kv.kv_heads, _TILE)
            tile_heads = _ceil(heads // kv.kv_heads, stacked)
            run = min(rows.run, count)
            tiles = _ceil(count, run) * _ceil(run, _TILE // tile_heads)
            shares = _SPLIT_BLOCKS // (tiles * kv.kv_heads * stacked)
            tiled = (tiles, kv.kv_heads * stacked, max(1, min(shares, parts)))
            more = (run, tile_heads, self._parts, self._arrived)
            lane.kernel(kernel, tiled, _WARP_BLOCK, (*args, *sizes, *more), name="attention")
            return
        kernel = self._formed("attention", CACHE=STORAGE[kv.dtype], HEAD_DIM=dim)
        own: tuple[int, ...] = ()
        grid = (heads, count, 1)
        block = _WARP_BLOCK
        if self._thread:
            group = heads // kv.kv_heads
            queries = min(max(_ceil(count * heads, _THREAD_SHARES), group), _THREAD_QUERIES)
            own = (queries,)
            grid = (_ceil(count * group, queries), kv.kv_heads, 1)
            block = 1
        lane.kernel(kernel, grid, block, (*args, *sizes, *own), name="attention")

    def attention_parts(self, rows: int, heads: int, kv: PagedKV) -> int:
        """Parts in which `attention` adds up a row over this cache, after making room for `rows`.

        0 where a kernel without parts serves the cache.
        """
        if self._thread or kv.head_dim not in (64, 128) or kv.dtype == "float32":
            return 0
        parts = min(_ceil(kv.positions, _SPLIT), _PARTS)
        size = parts * rows * heads * (kv.head_dim + 4)
        if parts > 1 and (self._parts is None or self._parts.shape[0] < size):
            self._parts = self.device.empty((size,), "float32")
        if self._arrived is None or self._arrived.shape[0] < rows * heads:
            self._arrived = self.device.zeros((rows * heads,), "int32")
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
        """Move what the accepted drafts of a tree left to where a chain would have left it.

        Parameters
        ----------
        kv : of the target, all of whose layers are compacted.
        row_slot, result : int32[B] and int32[B, row words], of the round that was verified.
        features : float32[R, columns], compacted alike.
        first : int32[B], the first row of each.
        """
        batch = row_slot.shape[0]
        item = kv.kv_heads * kv.head_dim
        kernel = self._kernel("compact", "compact_cache", CACHE=STORAGE[kv.dtype])
        sizes = (kv.slots, kv.max_pages, kv.page_shift, item)
        layer = (kv.scratch_page + 1) * kv.page_size * item
        args = (kv.k, kv.v, layer, row_slot, result, result.shape[1], kv.page_table, *sizes)
        block = 1 if self._thread else _ELEMENT_BLOCK
        lane.kernel(kernel, (batch, kv.layers, 1), block, args, name="compact cache")
        if features is not None:
            expect("compact: first", first, "int32", B=batch)
            kernel = self._kernel("compact", "compact_rows", CACHE=STORAGE[kv.dtype])
            moved = (features, first, features.shape[1], row_slot, result, result.shape[1])
            lane.kernel(kernel, batch, block, moved, name="compact features")

    def silu_mul(self, lane: Lane, gate_up: DeviceArray, out: DeviceArray) -> None:
        """out = silu(gate) * up: gate_up float32[R, 2 width], out [R, width] as of `norm`."""
        rows, width = out.shape
        expect("silu: gate_up", gate_up, "float32", R=rows, width=2 * width)
        expect("silu: out", out, out.dtype, R=rows, width=width)
        grid, block = self._elements(rows, width, self._chunk)
        kernel = self._kernel(
            "elements", "silu_mul", WEIGHT="float", OUT=_storage(out), CHUNK=self._chunk
        )
        lane.kernel(kernel, grid, block, (gate_up, out, rows, width), name="silu")

    def gather(
        self,
        lane: Lane,
        x: DeviceArray,
        index: DeviceArray,
        out: DeviceArray,
        name: str = "gather",
        norm: Norm | None = None,
    ) -> None:
        """out[b] = x[index[b]] as float32[B, width], and its norm; an index outside x's rows gives
        zeros."""
        count, width = out.shape
        expect(f"{name}: index", index, "int32", B=count)
        expect(f"{name}: out", out, "float32", B=count, width=x.shape[1])
        if norm is not None:
            expect(f"{name}: norm", norm.weight, "float32", width=width)
            expect(f"{name}: normed", norm.out, norm.out.dtype, B=count, width=width)
            block = self._norm_block
            kernel = self._kernel(
                "norm",
                "gather_norm",
                WEIGHT=_storage(x),
                OUT=_storage(norm.out),
                NORM_THREADS=block,
            )
            args = (x, index, out, norm.weight, norm.out, x.shape[0], width, norm.eps)
            lane.kernel(kernel, count, block, args, name=name)
            return
        grid, block = self._elements(count, width, self._chunk)
        kernel = self._kernel("elements", "gather_rows", WEIGHT=_storage(x), CHUNK=self._chunk)
        lane.kernel(kernel, grid, block, (x, index, out, count, x.shape[0], width), name=name)

    def scale(self, lane: Lane, x: DeviceArray, factor: float, cap: float = 0.0) -> None:
        """x = factor * x in place, float32[R, width]; with a `cap` cap * tanh(that / cap)."""
        rows, width = x.shape
        expect("scale: x", x, "float32", R=rows, width=width)
        grid, block = self._elements(rows, width, self._chunk)
        kernel = self._kernel("elements", "scale_rows", WEIGHT="float", CHUNK=self._chunk)
        lane.kernel(kernel, grid, block, (x, rows, width, factor, cap), name="scale")

    def convolve(
        self,
        lane: Lane,
        x: DeviceArray,
        base: DeviceArray,
        dynamic: DeviceArray,
        which: int,
        apart: int,
        out: DeviceArray,
        residual: DeviceArray | None = None,
    ) -> None:
        """out = x convolved over rows that stand `apart`, and `residual`: all float32[R, width].

        Parameters
        ----------
        base, dynamic : float32[2, size, width], and [R, 2 * size * groups], of each row and group
            of neighbouring columns: their sum is the kernel, the first or the second by `which`. It
            reaches back over rows, the row itself first.
        """
        (rows, width), size = x.shape, base.shape[1]
        groups = dynamic.shape[1] // (2 * size)
        expect("convolve: base", base, "float32", two=2, size=size, width=width)
        expect("convolve: dynamic", dynamic, "float32", R=rows, columns=2 * size * groups)
        for array in (x, out, *([] if residual is None else [residual])):
            expect("convolve: rows", array, "float32", R=rows, width=width)
        grid, block = self._elements(rows, width, self._chunk)
        kernel = self._kernel("elements", "convolve_rows", WEIGHT="float", CHUNK=self._chunk)
        args = (x, base, dynamic, residual, out, rows, width, size, groups, which, apart)
        lane.kernel(kernel, grid, block, args, name="convolution")

    def eagle_input(
        self,
        lane: Lane,
        token: DeviceArray,
        table: DeviceArray,
        hidden: DeviceArray,
        embedding_norm: DeviceArray,
        hidden_norm: DeviceArray,
        eps: float,
        norm_before_residual: bool,
        x: DeviceArray,
        stream: DeviceArray,
    ) -> None:
        """x = [norm(embedding), norm(hidden)] float32[R, 2 width]; stream = hidden (or its norm).

        `hidden` and `stream` are float32[R, width] and may be the same array.
        """
        rows, width = hidden.shape
        expect("eagle input: token", token, "int32", R=rows)
        expect("eagle input: hidden", hidden, "float32", R=rows, width=table.shape[1])
        expect("eagle input: x", x, "float32", R=rows, width=2 * width)
        expect("eagle input: stream", stream, "float32", R=rows, width=width)
        expect("eagle input: embedding norm", embedding_norm, "float32", width=width)
        expect("eagle input: hidden norm", hidden_norm, "float32", width=width)
        kernel = self._kernel(
            "norm", "eagle_input", WEIGHT=_storage(table), NORM_THREADS=self._norm_block
        )
        args = (table, token, hidden, embedding_norm, hidden_norm, x, stream)
        sizes = (rows, table.shape[0], width, eps, int(norm_before_residual))
        lane.kernel(kernel, rows, self._norm_block, (*args, *sizes), name="eagle input")


def _multiplied(dtype: str) -> str:
    """What weights are on tensor cores."""
    return "bfloat16" if dtype == E4M3 else dtype


def _storage(array: DeviceArray) -> str:
    names = {**STORAGE, E4M3: "e4m3_t"}
    try:
        return names[array.dtype]
    except KeyError:
        raise ShapeError(f"weights are {array.dtype}, expected one of {sorted(names)}") from None
