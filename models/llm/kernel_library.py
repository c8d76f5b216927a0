"""Kernel library of the decoder models.

Each method checks its operands and adds kernels to a `Lane`, an in-order sequence of work that
becomes a part of a CUDA graph or runs on a stream.

Matrix and attention kernels exist in two forms; norm kernels have one block size for each form:

``thread``
    For the soft device, which runs kernels on the CPU. Each thread computes many outputs in loops
    without barriers, which a C++ compiler can vectorise.
``warp``
    For GPUs. The soft device runs this form in tests only.

A process uses one form. The results of the two forms differ in rounding. Every kernel is row
invariant: within a form, the bits of an output row depend only on its input row and, for attention,
on the KV cache of its slot, but not on the other rows of the batch.

Form ``warp`` runs a matrix product on tensor cores if three conditions hold. The weights have 16
bits, or 8 bits that are converted to bfloat16 when they are loaded. The inner size is a multiple of
128. The number of output columns is a multiple of 16.

Activations are float32. For tensor cores they are rounded to the dtype of the weights, as is usual
in training and serving. With ``activations="float32"`` each activation is instead split into two
numbers of that dtype, the rounded value and the remainder. Together the two numbers have 16 bits of
mantissa with bfloat16 and 22 bits with float16. Sums are accumulated in float32.

Attention runs on tensor cores if the KV cache has 16 bits and heads have 64 or 128 elements.
Products and attention on tensor cores use workspace that all calls share, so the work of one
`ModelKernels` must run in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from graft.cudagraph.device import Device
from graft.cudagraph.driver.dtypes import E4M3, itemsize
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.errors import OptionError, ShapeError
from graft.cudagraph.kernels.kernels import Kernel
from graft.cudagraph.lanes import Lane
from graft.models.cache.kv import STORAGE, PagedKV
from graft.models.llm.rows import Rows
from graft.models.llm.weights import Matrix, ScaledMatrix
from graft.sampling.checks import expect

FOLDER = Path(__file__).resolve().parent / "kernels"
FORMS = {"soft": ("thread", "warp"), "cuda": ("warp",)}
ACTIVATIONS = ("rounded", "float32")

# Tile and block sizes. They must match the constants in models/llm/kernels.
_THREAD_COLUMNS = 64
_THREAD_ROWS = 48
_THREAD_CHUNK = 64
_THREAD_QUERIES = 48
_THREAD_BLOCKS = 8  # blocks for the attention of few rows, to use several CPU threads
_WARP_BLOCK = 128
_WARP_COLUMNS = 2 * _WARP_BLOCK // 32
_WARP_ROWS = 8
_MMA_BLOCK = 256
_MMA_K_MULTIPLE = 128
_MMA_COLUMNS = 16
_MMA_MAX_SPLITS = 8  # split-K: maximum number of blocks that compute one tile
_MMA_TILE_COLUMNS = 128
# Inner indices of all pipeline stages in shared memory, by bytes per weight and rows per tile.
_MMA_STAGED = {1: {32: 320, 64: 384, 128: 256}, 2: {32: 192, 64: 256, 128: 192}}
# Tiles of this number of rows need more shared memory than some GPUs have, and inputs of 16 bits.
_MMA_TALL_TILE = 256
_MMA_TALL_STAGED = 128
_MMA_TALL_SHARED = 227 * 1024
NORM_GROUP = 16  # number of output columns per sum of squares of a folded norm
_MMA_FEW_ROWS = 16  # maximum rows for linear_few; more rows use linear_many
#: Number of multiprocessors of an H100 or H200. The number of K splits is chosen for these GPUs.
MULTIPROCESSORS = 132
# Blocks of linear_many that run on one multiprocessor at the same time, by rows per tile.
_MMA_BLOCKS_PER_MULTIPROCESSOR = {32: 2, 64: 1, 128: 1, _MMA_TALL_TILE: 1}
# Time of a wave of tall tiles, in units of the time of a wave of tiles of 128 rows. It is the ratio
# of their traffic through the L2 cache.
_MMA_TALL_WAVE = 1.5
# Estimated cost of K splits, in units of the time of one wave without splits. The wait for the last
# block costs _MMA_SPLIT_COST. The partial sums of one row of all concurrent tiles cost
# _MMA_SPLIT_COST_PER_ROW with up to _MMA_SPLIT_COST_INNER inner indices, and proportionally less
# with more.
_MMA_SPLIT_COST_PER_ROW = 0.3 / 32
_MMA_SPLIT_COST_INNER = 4096
_MMA_SPLIT_COST = 0.05
_NORM_BLOCK = 256
_ELEMENT_BLOCK = 128
_ATTENTION_TILE = 16
_ATTENTION_SPLIT = 64  # minimum positions per part of split attention
_ATTENTION_MAX_PARTS = 32
_ATTENTION_BLOCKS = 512  # approximate number of blocks that a GPU runs at the same time

#: Share of the L1 cache, in percent, that all model kernels request as shared memory. With equal
#: shares a kernel can start while the previous one runs (programmatic dependent launch). Of the 228
#: KB of an H100, 57 % are rounded up to 132 KB: enough for two blocks of linear_many with 32 rows
#: (61 KB each) or one block with up to 128 rows (97 KB). A block with 256 rows needs 225 KB and
#: starts when the previous kernel has ended.
SHARED_PERCENT = 57

# Arguments for the RoPE and KV cache epilogue of a product that does not use this epilogue: seven
# null pointers and six sizes.
_NO_KV_WRITE: tuple[object, ...] = (None,) * 7 + (0,) * 6


def _ceil_div(count: int, unit: int) -> int:
    return -(-count // unit)


class MmaShape(NamedTuple):
    """Launch configuration of a tensor-core product (kernels/linear_mma.cuh).

    Attributes
    ----------
    kernel
        Name of the kernel and of its file.
    defines
        Compile-time constants that depend on the shape.
    grid
        Grid of the launch; z is the number of K splits.
    shared
        Dynamic shared memory, in bytes.
    partials
        Size of the split-K workspace, in floats; 0 without splits.
    blocks_per_multiprocessor
        Number of blocks that run on one multiprocessor at the same time.
    """

    kernel: str
    defines: dict[str, int]
    grid: tuple[int, int, int]
    shared: int = 0
    partials: int = 0
    blocks_per_multiprocessor: int = 2

    @property
    def waves(self) -> int:
        """Number of times that the blocks fill all multiprocessors of an H100 or H200."""
        return _ceil_div(math.prod(self.grid), MULTIPROCESSORS * self.blocks_per_multiprocessor)


def mma_shape(
    rows: int,
    columns: int,
    nbytes: int = 2,
    *,
    inner: int = _MMA_SPLIT_COST_INNER,
    allow_tall: bool = False,
) -> MmaShape:
    """Return the launch configuration of a tensor-core product.

    The result of a product has the same bits with every configuration.

    Parameters
    ----------
    rows
        Number of rows that are multiplied: the number of input rows, or twice that number if
        activations are split.
    columns
        Number of outputs per row.
    nbytes
        Bytes of a stored weight: 1 or 2.
    inner
        Number of inputs per row.
    allow_tall
        Whether tiles may have 256 rows, which requires inputs of 16 bits and a GPU with about 225
        KB of shared memory per block.
    """
    if rows <= _MMA_FEW_ROWS:
        tiles = _ceil_div(rows, 8)
        return MmaShape("linear_few", {"TILES": tiles}, (columns // _MMA_COLUMNS, 1, 1))
    staged = _MMA_STAGED[nbytes]
    block = next((size for size in staged if rows <= size), max(staged))
    if allow_tall and rows > block:
        block = _choose_block(rows, columns, inner)
    across = _ceil_div(columns, _MMA_TILE_COLUMNS)
    down = _ceil_div(rows, block)
    splits = _choose_splits(across * down, block, inner)
    partials = 0
    if splits > 1:
        partials = across * down * _MMA_MAX_SPLITS * block * _MMA_TILE_COLUMNS
    stage_bytes = _MMA_TILE_COLUMNS * nbytes + block * 2
    if block == _MMA_TALL_TILE:
        shared = _MMA_TALL_STAGED * stage_bytes + 4 * block * _MMA_TILE_COLUMNS
    else:
        shared = staged[block] * stage_bytes
    return MmaShape(
        "linear_many",
        {"ROW_BLOCK": block},
        (down, across, splits),
        shared,
        partials,
        _MMA_BLOCKS_PER_MULTIPROCESSOR[block],
    )


def _choose_block(rows: int, columns: int, inner: int) -> int:
    """Return the number of rows per tile, 128 or 256, with the least estimated time."""

    def estimated_time(block: int) -> float:
        tiles = _ceil_div(columns, _MMA_TILE_COLUMNS) * _ceil_div(rows, block)
        splits = _choose_splits(tiles, block, inner)
        return _estimated_time(tiles, block, inner, splits)

    return min((128, _MMA_TALL_TILE), key=estimated_time)


def _choose_splits(tiles: int, rows: int, inner: int) -> int:
    """Return the number of K splits with the least estimated time.

    Parameters
    ----------
    tiles
        Number of tiles of the product.
    rows
        Number of rows of a tile.
    inner
        Number of inputs per row.
    """
    # min() returns the first, that is the smallest, of several equally good numbers.
    return min(
        (1, 2, 4, _MMA_MAX_SPLITS), key=lambda splits: _estimated_time(tiles, rows, inner, splits)
    )


def _estimated_time(tiles: int, rows: int, inner: int, splits: int) -> float:
    """Return the estimated time of a product, in units of a wave of blocks without splits.

    With s splits there are more waves, each of which takes 1 / s of the time, but the partial sums
    have to be written and added.

    Parameters
    ----------
    tiles, rows, inner
        As in `_choose_splits`.
    splits
        Number of K splits.
    """
    concurrent = MULTIPROCESSORS * _MMA_BLOCKS_PER_MULTIPROCESSOR[rows]
    waves = _ceil_div(tiles * splits, concurrent) / splits
    if rows == _MMA_TALL_TILE:
        waves *= _MMA_TALL_WAVE
    if splits == 1:
        return waves
    cost_per_row = _MMA_SPLIT_COST_PER_ROW * min(1.0, _MMA_SPLIT_COST_INNER / inner)
    return waves + cost_per_row * rows * tiles / concurrent + _MMA_SPLIT_COST


class Norm(NamedTuple):
    """RMSNorm between a product that writes rows and a product that reads the normed rows.

    A norm whose `square_sums` is not None is folded into the two products and needs no kernel of
    its own. The product that writes the rows is the producer; the product that reads the normed
    rows is the consumer. The producer multiplies its rows by `weight`, writes them to `out`, and
    writes the sums of the squares of its rows to `square_sums`. The consumer computes the root mean
    square of each row from these sums and divides its own results by the root mean square.

    Attributes
    ----------
    weight
        float32[width], weight of the norm.
    eps
        Constant added to the mean square.
    out
        [R, width], the normed rows in the dtype that the consumer reads.
    square_sums
        float32[R, width / NORM_GROUP], sums of squares of a folded norm. None for a norm with its
        own kernel.
    """

    weight: DeviceArray
    eps: float
    out: DeviceArray
    square_sums: DeviceArray | None = None


class HeadNorms(NamedTuple):
    """RMSNorms of every query head and of every key head.

    Attributes
    ----------
    query, key
        Weights of the norms, float32[head_dim].
    eps
        Constant added to the mean square.
    """

    query: DeviceArray
    key: DeviceArray
    eps: float


class KVWrite(NamedTuple):
    """Destination of the keys and values of a forward pass, and the RoPE that precedes it.

    Attributes
    ----------
    rope_table
        float32[positions, head_dim], cosines and then sines of each position (`Rope.table`).
    rows
        Slot and position of each row.
    kv
        KV cache that is written.
    layer
        Layer of `kv`.
    heads
        Number of query heads. Queries are rotated but not cached.
    """

    rope_table: DeviceArray
    rows: Rows
    kv: PagedKV
    layer: int
    heads: int


@dataclass(frozen=True)
class _Product:
    """Checked operands of x W^T.

    Attributes
    ----------
    x
        [rows, inner], float32 or the 16-bit dtype that the kernel reads.
    weight
        [columns, inner] as stored.
    scale
        float32[columns], scales of the weight's rows; None if there are none.
    bias
        float32[columns], added to the scaled products; None for no bias.
    square_sums, eps
        Sums of squares and eps of the folded norm of `x`; None and 0 without a folded norm.
    rows, columns, inner
        Number of input rows, of output columns and of elements per dot product.
    x_is_rounded
        Whether `x` already has the 16-bit dtype in which tensor cores multiply.
    tensor_cores
        Whether the product runs on tensor cores.
    """

    x: DeviceArray
    weight: DeviceArray
    scale: DeviceArray | None
    bias: DeviceArray | None
    square_sums: DeviceArray | None
    eps: float
    rows: int
    columns: int
    inner: int
    x_is_rounded: bool
    tensor_cores: bool


class ModelKernels:
    """The model kernels of one device in one form.

    All calls use the same workspace, so the work of one object must run in order.

    Parameters
    ----------
    device
        Device that the kernels are compiled for.
    form
        ``thread`` (soft device only) or ``warp``. None selects the device's default.
    activations
        Precision of the activations on tensor cores, ``rounded`` or ``float32``.

    Raises
    ------
    OptionError
        If the device does not support the form, or `activations` is unknown.
    """

    def __init__(
        self, device: Device, form: str | None = None, activations: str = "rounded"
    ) -> None:
        self.device = device
        forms = FORMS["cuda" if device.runs_gpu_code else "soft"]
        self.form = form or forms[0]
        if self.form not in forms:
            raise OptionError(
                f"kernel form {form!r}: expected one of {forms} on a {device.kind} device"
            )
        if activations not in ACTIVATIONS:
            raise OptionError(f"activations {activations!r}: expected one of {ACTIVATIONS}")
        self.activations = activations
        # Shared memory that a block may use, including the static shared memory of its kernel.
        self._max_shared = device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        # Keeps the compiled modules loaded. A module that no graph references would otherwise be
        # unloaded after each launch of a prefill.
        self._kernels: dict[tuple, Kernel] = {}
        self._workspace: dict[str, DeviceArray] = {}
        # Split attention: partial results, and counters that every kernel leaves at zero.
        self._attention_partials: DeviceArray | None = None
        self._attention_counters: DeviceArray | None = None

    @property
    def _thread(self) -> bool:
        return self.form == "thread"

    def _kernel(self, file: str, name: str, **defines: object) -> Kernel:
        key = (file, name, *defines.items())
        found = self._kernels.get(key)
        if found is None:
            found = self.device.load(FOLDER / f"{file}.cu", defines)[name]
            found.prefer_shared(SHARED_PERCENT)
            self._kernels[key] = found
        return found

    def _kernel_of_form(self, name: str, **defines: object) -> Kernel:
        name = f"{name}_{self.form}"
        return self._kernel(name, name, **defines)

    def _elementwise_launch(self, rows: int, width: int, chunk: int) -> tuple[int, int]:
        """Return the grid and block sizes of an elementwise kernel, `chunk` elements per thread."""
        block = 8 if self._thread else _ELEMENT_BLOCK
        return _ceil_div(rows * _ceil_div(width, chunk), block), block

    @property
    def _chunk(self) -> int:
        return _THREAD_CHUNK if self._thread else 1

    @property
    def _norm_block(self) -> int:
        return 1 if self._thread else _NORM_BLOCK

    @property
    def _splits_activations(self) -> bool:
        return self.activations == "float32"

    @property
    def _allows_tall_tiles(self) -> bool:
        return self._max_shared >= _MMA_TALL_SHARED

    # Methods that return which kernels and dtypes a product can use.

    def input_dtype(self, weight: Matrix) -> str:
        """Return the dtype that `linear` reads fastest for `weight`.

        An input that was rounded to this dtype gives the same bits as the float32 input, because
        `linear` rounds float32 inputs to the same dtype.
        """
        if self.activations == "rounded" and self.uses_tensor_cores(weight.dtype, *weight.shape):
            return _mma_dtype(weight.dtype)
        return "float32"

    def uses_tensor_cores(self, dtype: str, columns: int, inner: int) -> bool:
        """Return whether a product with a weight of this dtype and shape runs on tensor cores."""
        fits = inner % _MMA_K_MULTIPLE == 0 and columns % _MMA_COLUMNS == 0
        return not self._thread and fits and dtype != "float32"

    def can_fold_norm(self, producer: Matrix, consumer: Matrix) -> bool:
        """Return whether the norm between products with these weights can be folded (`Norm`).

        Both products must run on tensor cores. With float16 weights a norm cannot be folded,
        because values that are not yet divided by the root mean square may exceed the range of
        float16. After a row-parallel shard it cannot be folded, because the sums are complete only
        after the all-gather.
        """
        if isinstance(producer, ScaledMatrix) and producer.all_gather is not None:
            return False
        return all(
            weight.dtype != "float16" and self.uses_tensor_cores(weight.dtype, *weight.shape)
            for weight in (producer, consumer)
        )

    def can_fuse_rope(self, head_dim: int, dtype: str, columns: int, inner: int) -> bool:
        """Return whether the kernel of a QKV product can also apply RoPE and write the KV cache.

        Parameters
        ----------
        head_dim
            Elements of a head.
        dtype, columns, inner
            Dtype and shape of the weight.
        """
        fits = head_dim % _MMA_COLUMNS == 0
        return fits and self.uses_tensor_cores(dtype, columns, inner)

    # Matrix products.

    def linear(
        self,
        lane: Lane,
        x: DeviceArray | Norm,
        weight: Matrix,
        out: DeviceArray,
        *,
        residual: DeviceArray | None = None,
        copy_to: tuple[DeviceArray, int] | None = None,
        norm: Norm | None = None,
        name: str = "linear",
    ) -> None:
        """Compute out = x W^T + residual and, if requested, a copy and an RMSNorm of the result.

        Parameters
        ----------
        lane
            Lane that the kernel is added to.
        x
            [R, inner], float32 or of `input_dtype`; or the `Norm` that another product wrote.
        weight
            [columns, inner], float32, float16, bfloat16 or E4M3 without NaN. If it has row scales,
            the sums are multiplied by them. If it has a bias, the bias is then added, before the
            residual. For a row-parallel shard the partial products of all ranks are added in rank
            order, and then the residual. No kernel of the lane may write it: with programmatic
            dependent launch, weights are loaded while the previous kernel runs.
        out
            float32[R, columns], receives the result.
        residual
            float32[R, columns], which may be `out`; None adds nothing.
        copy_to
            Array float32[R, stride] that receives a copy of the result, and the first column to
            write; None for no copy.
        norm
            Norm of the result for the next product; None to compute no norm.
        name
            Node name and prefix of error messages.

        Raises
        ------
        ShapeError
            If an operand has the wrong shape or dtype, or the norm is folded and the product does
            not run on tensor cores.
        """
        if isinstance(weight, ScaledMatrix) and weight.all_gather is not None:
            self._linear_row_parallel(lane, x, weight, out, residual, copy_to, name)
            if norm is not None:
                self.norm(lane, out, norm.weight, norm.eps, norm.out)
            return
        product = self._check_product(x, weight, name)
        expect(f"{name}: out", out, "float32", R=product.rows, columns=product.columns)
        if residual is not None:
            shape = {"R": product.rows, "columns": product.columns}
            expect(f"{name}: residual", residual, "float32", **shape)
        folded = None
        if norm is not None and norm.square_sums is not None:
            self._check_folded_norm(product, norm, weight, name)
            folded = norm
        args = self._linear_args(product, out, residual, copy_to, name)
        if product.tensor_cores:
            self._launch_mma(lane, product, out, args, name, norm=folded)
        else:
            self._launch_without_tensor_cores(lane, product, args, name)
        if norm is not None and folded is None:
            self.norm(lane, out, norm.weight, norm.eps, norm.out)

    def gated_linear(
        self,
        lane: Lane,
        x: DeviceArray | Norm,
        weight: Matrix,
        out: DeviceArray,
        name: str = "linear",
    ) -> None:
        """Compute out = silu(x G^T) * (x U^T) in one kernel: the first half of a gated MLP.

        Parameters
        ----------
        lane
            Lane that the kernel is added to.
        x
            [R, inner], as in `linear`.
        weight
            [columns, inner], gate and up projections that `Weights.stacked` has interleaved in
            blocks of 8 rows.
        out
            [R, columns / 2] of any dtype.
        name
            Node name and prefix of error messages.

        Raises
        ------
        ShapeError
            If an operand has the wrong shape or dtype, or the product does not run on tensor
            cores.
        """
        product = self._check_product(x, weight, name)
        expect(f"{name}: out", out, out.dtype, R=product.rows, columns=product.columns >> 1)
        self._require_tensor_cores(product, "a gated product", name)
        args = self._linear_args(product, out, None, None, name)
        self._launch_mma(lane, product, out, args, name, gated=True)

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

        If there are no head norms and `can_fuse_rope` returns True, this is one kernel, which
        stores only the queries in `qkv`. Otherwise it is the sequence `linear`, `head_norm`,
        `rope_and_store`.

        Parameters
        ----------
        lane
            Lane that the kernels are added to.
        x
            [R, inner], as in `linear`.
        weight
            [(heads + 2 kv_heads) * head_dim, inner]. If RoPE is fused, `Weights.stacked` must have
            interleaved the rows of each head.
        qkv
            float32[R, (heads + 2 kv_heads) * head_dim], receives the result.
        write
            RoPE table, rows and cache layer.
        head_norms
            Norms of queries and keys before RoPE (Qwen3).
        """
        dim = write.kv.head_dim
        if head_norms is None and self.can_fuse_rope(dim, weight.dtype, *weight.shape):
            self._fused_qkv(lane, x, weight, qkv, write)
            return
        self.linear(lane, x, weight, qkv, name="qkv")
        if head_norms is not None:
            self.head_norm(lane, qkv, head_norms, write.heads)
        self.rope_and_store(lane, qkv, write)

    def _fused_qkv(
        self, lane: Lane, x: DeviceArray | Norm, weight: Matrix, qkv: DeviceArray, write: KVWrite
    ) -> None:
        """Compute `project_qkv` in one kernel. The rows of each head are interleaved."""
        name = "qkv"
        store_args = _kv_write_args(qkv, write)
        product = self._check_product(x, weight, name)
        expect(f"{name}: out", qkv, "float32", R=product.rows, columns=product.columns)
        args = self._linear_args(product, qkv, None, None, name)
        self._launch_mma(lane, product, qkv, args, name, store=(write.kv, store_args))

    def _linear_row_parallel(
        self,
        lane: Lane,
        x: DeviceArray | Norm,
        weight: ScaledMatrix,
        out: DeviceArray,
        residual: DeviceArray | None,
        copy_to: tuple[DeviceArray, int] | None,
        name: str,
    ) -> None:
        """Compute this rank's partial product and add the partial products of all ranks."""
        assert weight.all_gather is not None and weight.bias is None
        partial = weight.all_gather.local_buffer(*out.shape)
        self.linear(lane, x, ScaledMatrix(weight.values, weight.scale), partial, name=name)
        partials = weight.all_gather.all_gather(lane, partial)
        ranks, rows, width = partials.shape
        grid, block = self._elementwise_launch(rows, width, self._chunk)
        copy, offset = copy_to if copy_to is not None else (None, 0)
        stride = copy.shape[1] if copy is not None else 0
        kernel = self._kernel("elements", "add_parts", WEIGHT="float", CHUNK=self._chunk)
        args = (partials, residual, out, copy, ranks, rows, width, offset, stride)
        lane.kernel(kernel, grid, block, args, name="sum of ranks")

    def _check_product(self, x: DeviceArray | Norm, weight: Matrix, name: str) -> _Product:
        """Check the inputs of x W^T and decide whether it runs on tensor cores."""
        square_sums = None
        eps = 0.0
        if isinstance(x, Norm):
            square_sums = x.square_sums
            eps = x.eps
            x = x.out
        rows, inner = x.shape
        columns = weight.shape[0]
        x_is_rounded = x.dtype == self.input_dtype(weight) != "float32"
        scale = None
        bias = None
        if isinstance(weight, ScaledMatrix):
            scale = weight.scale
            bias = weight.bias
            weight = weight.values
        if scale is not None:
            expect(f"{name}: scale", scale, "float32", columns=columns)
        if bias is not None:
            expect(f"{name}: bias", bias, "float32", columns=columns)
        expect(f"{name}: weight", weight, weight.dtype, columns=columns, inner=inner)
        expect(f"{name}: x", x, x.dtype if x_is_rounded else "float32", R=rows, inner=inner)
        product = _Product(
            x=x,
            weight=weight,
            scale=scale,
            bias=bias,
            square_sums=square_sums,
            eps=eps,
            rows=rows,
            columns=columns,
            inner=inner,
            x_is_rounded=x_is_rounded,
            tensor_cores=self.uses_tensor_cores(weight.dtype, columns, inner),
        )
        if square_sums is not None:
            self._require_tensor_cores(product, "a folded norm", name)
            groups = inner // NORM_GROUP
            expect(f"{name}: square sums of x", square_sums, "float32", R=rows, groups=groups)
        return product

    def _require_tensor_cores(self, product: _Product, what: str, name: str) -> None:
        """Raise a `ShapeError` if the product does not run on tensor cores.

        The error says that the feature `what` requires tensor cores.
        """
        if not product.tensor_cores:
            raise ShapeError(
                f"{name}: {what} requires tensor cores, which kernel form {self.form!r} does not "
                f"use for a {product.weight.dtype}[{product.columns}, {product.inner}] weight"
            )

    def _check_folded_norm(self, product: _Product, norm: Norm, weight: Matrix, name: str) -> None:
        """Check that a product runs on tensor cores, and check the arrays of its folded norm."""
        self._require_tensor_cores(product, "a folded norm", name)
        assert norm.square_sums is not None
        rows = product.rows
        columns = product.columns
        groups = columns // NORM_GROUP
        expect(f"{name}: norm", norm.weight, "float32", columns=columns)
        expect(f"{name}: norm output", norm.out, self.input_dtype(weight), R=rows, columns=columns)
        expect(f"{name}: square sums", norm.square_sums, "float32", R=rows, groups=groups)

    @staticmethod
    def _linear_args(
        product: _Product,
        out: DeviceArray,
        residual: DeviceArray | None,
        copy_to: tuple[DeviceArray, int] | None,
        name: str,
    ) -> tuple[object, ...]:
        """Return the kernel arguments that all linear kernels have in common."""
        rows = product.rows
        columns = product.columns
        copy, offset = copy_to if copy_to is not None else (None, 0)
        stride = 0
        if copy is not None:
            stride = copy.shape[1]
            expect(f"{name}: copy_to", copy, "float32", R=rows, stride=stride)
            if offset < 0 or offset + columns > stride:
                raise ShapeError(
                    f"{name}: copy_to columns {offset}..{offset + columns} are outside "
                    f"stride={stride}"
                )
        return (
            product.weight,
            product.scale,
            product.bias,
            product.x,
            residual,
            out,
            copy,
            rows,
            columns,
            product.inner,
            offset,
            stride,
        )

    def _launch_without_tensor_cores(
        self, lane: Lane, product: _Product, args: tuple[object, ...], name: str
    ) -> None:
        if self._thread:
            across = _ceil_div(product.columns, _THREAD_COLUMNS)
            grid = (across, _ceil_div(product.rows, _THREAD_ROWS), 1)
            block = 1
        else:
            across = _ceil_div(product.columns, _WARP_COLUMNS)
            grid = (across, _ceil_div(product.rows, _WARP_ROWS), 1)
            block = _WARP_BLOCK
        kernel = self._kernel_of_form("linear", WEIGHT=_storage(product.weight))
        lane.kernel(kernel, grid, block, args, name=name)

    def _launch_mma(
        self,
        lane: Lane,
        product: _Product,
        out: DeviceArray,
        args: tuple[object, ...],
        name: str,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        store: tuple[PagedKV, tuple[object, ...]] | None = None,
    ) -> None:
        """Launch a tensor-core product with one of the epilogues.

        Parameters
        ----------
        lane, out, name
            As in `linear`.
        product
            Checked operands.
        args
            Result of `_linear_args`.
        norm
            Folded norm that the epilogue writes; None for none.
        gated
            Whether the epilogue computes silu(gate) * up.
        store
            KV cache and result of `_kv_write_args`, for an epilogue that applies RoPE and writes
            the cache; None for other epilogues.
        """
        defines: dict[str, object] = {
            "SPLIT_X": int(self._splits_activations),
            "WEIGHT16": STORAGE[_mma_dtype(product.weight.dtype)],
            "X16": int(product.x_is_rounded),
            "WEIGHT8": int(product.weight.dtype == E4M3),
            "BIAS": int(product.bias is not None),
            "GATED": int(gated),
            "OUT": _storage(out),
        }
        store_args = _NO_KV_WRITE
        if store is not None:
            kv, store_args = store
            defines |= {"ROPE_HEAD_DIM": kv.head_dim, "CACHE": STORAGE[kv.dtype]}
        norm_args: tuple[object, ...] = (None, None, None)
        if norm is not None:
            norm_args = (norm.weight, norm.out, norm.square_sums)
        rows = product.rows << self._splits_activations
        shape = mma_shape(
            rows,
            product.columns,
            itemsize(product.weight.dtype),
            inner=product.inner,
            allow_tall=product.x_is_rounded and self._allows_tall_tiles,
        )
        kernel = self._kernel(shape.kernel, shape.kernel, **defines, **shape.defines)
        args = (*args, product.square_sums, product.eps, *norm_args, *store_args)
        if shape.kernel == "linear_many":
            partials = self._zeroed_workspace("float32", shape.partials)
            counters = self._zeroed_workspace("int32", shape.grid[0] * shape.grid[1])
            args = (*args, partials, counters)
        lane.kernel(kernel, shape.grid, _MMA_BLOCK, args, shared=shape.shared, name=name)

    def _zeroed_workspace(self, dtype: str, size: int) -> DeviceArray | None:
        """Return workspace, which is zeroed when it is allocated and not between calls.

        All calls share the workspace. Partial sums are written before they are read, and the
        kernels reset counters to zero.
        """
        if size == 0:
            return None
        workspace = self._workspace.get(dtype)
        if workspace is None or workspace.shape[0] < size:
            workspace = self.device.zeros((size,), dtype)
            self._workspace[dtype] = workspace
        return workspace

    # Norms, RoPE and attention.

    def norm(
        self, lane: Lane, x: DeviceArray, weight: DeviceArray, eps: float, out: DeviceArray
    ) -> None:
        """Compute the RMSNorm of each row.

        Parameters
        ----------
        lane
            Lane that the kernel is added to.
        x
            float32[R, width].
        weight
            float32[width].
        eps
            Constant added to the mean square.
        out
            [R, width], float32 or of `input_dtype`.
        """
        rows, width = x.shape
        expect("norm: x", x, "float32", R=rows, width=width)
        expect("norm: weight", weight, "float32", width=width)
        expect("norm: out", out, out.dtype, R=rows, width=width)
        args = (x, weight, out, rows, width, eps)
        kernel = self._kernel(
            "norm", "norm_rows", WEIGHT="float", OUT=_storage(out), NORM_THREADS=self._norm_block
        )
        lane.kernel(kernel, rows, self._norm_block, args, name="norm")

    def head_norm(self, lane: Lane, qkv: DeviceArray, norms: HeadNorms, heads: int) -> None:
        """Compute the RMSNorm of each query head and key head in place.

        Parameters
        ----------
        lane
            Lane that the kernel is added to.
        qkv
            float32[R, (heads + 2 kv_heads) * head_dim].
        norms
            Weights and eps of the norms.
        heads
            Number of query heads.
        """
        rows, width = qkv.shape
        dim = norms.query.shape[0]
        kv_heads = (width // dim - heads) // 2
        expect("head norm: qkv", qkv, "float32", R=rows, width=(heads + 2 * kv_heads) * dim)
        for weight in (norms.query, norms.key):
            expect("head norm: weight", weight, "float32", D=dim)
        block = 1 if self._thread else 32
        kernel = self._kernel("norm", "head_norm", WEIGHT="float", NORM_THREADS=block)
        args = (qkv, norms.query, norms.key, rows, heads, kv_heads, dim, norms.eps)
        lane.kernel(kernel, rows * (heads + kv_heads), block, args, name="head norm")

    def rope_and_store(self, lane: Lane, qkv: DeviceArray, write: KVWrite) -> None:
        """Rotate queries (in place) and keys, and write keys and values to the KV cache.

        Parameters
        ----------
        lane
            Lane that the kernel is added to.
        qkv
            float32[R, (heads + 2 kv_heads) * head_dim], queries, keys and values.
        write
            RoPE table, rows and cache layer.
        """
        kv = write.kv
        count = write.rows.count
        dim = kv.head_dim
        store_args = _kv_write_args(qkv, write)
        chunk = dim // 2 if self._thread else 1
        kernel = self._kernel(
            "rope", "rope_and_store", CACHE=STORAGE[kv.dtype], HEAD_DIM=dim, CHUNK=chunk
        )
        heads = write.heads + 2 * kv.kv_heads
        grid, block = self._elementwise_launch(count * heads, dim // 2, chunk)
        lane.kernel(kernel, grid, block, (qkv, count, *store_args), name="rope, kv write")

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
        """Compute causal attention of each row over the KV cache of its slot.

        A row attends to the positions 0..pos of its slot. A row of a draft tree attends to the
        committed positions, to its ancestors in the tree and to itself. Padding rows give zeros.

        Parameters
        ----------
        lane
            Lane that the kernel is added to.
        qkv
            float32[R, (heads + 2 kv_heads) * head_dim], of which only the queries are read.
        rows
            Slot, last visible position and ancestors of each row.
        kv, layer
            KV cache and its layer.
        heads
            Number of query heads.
        out
            float32[R, heads * head_dim].
        """
        count = rows.count
        dim = kv.head_dim
        width = (heads + 2 * kv.kv_heads) * dim
        expect("attention: qkv", qkv, "float32", R=count, heads=width)
        expect("attention: out", out, "float32", R=count, heads=heads * dim)
        args = (
            qkv,
            rows.slot,
            rows.pos,
            rows.ancestors,
            kv.page_table,
            kv.k[layer],
            kv.v[layer],
            out,
            count,
            heads,
            kv.kv_heads,
            kv.slots,
            kv.max_pages,
            kv.page_shift,
            dim**-0.5,
        )
        parts = self.reserve_attention(count, heads, kv)
        if parts:
            self._launch_split_attention(lane, args, rows, kv, heads, parts)
        else:
            self._launch_unsplit_attention(lane, args, count, kv, heads)

    def _launch_unsplit_attention(
        self, lane: Lane, args: tuple[object, ...], count: int, kv: PagedKV, heads: int
    ) -> None:
        """Launch attention without tensor cores for `count` rows."""
        defines = {"CACHE": STORAGE[kv.dtype], "HEAD_DIM": kv.head_dim}
        kernel = self._kernel_of_form("attention", **defines)
        if self._thread:
            group = heads // kv.kv_heads
            queries = max(_ceil_div(count * heads, _THREAD_BLOCKS), group)
            queries = min(queries, _THREAD_QUERIES)
            grid = (_ceil_div(count * group, queries), kv.kv_heads, 1)
            lane.kernel(kernel, grid, 1, (*args, queries), name="attention")
        else:
            lane.kernel(kernel, (heads, count, 1), _WARP_BLOCK, args, name="attention")

    def _launch_split_attention(
        self, lane: Lane, args: tuple[object, ...], rows: Rows, kv: PagedKV, heads: int, parts: int
    ) -> None:
        """Launch attention on tensor cores.

        As in Flash-Decoding, several blocks share the KV positions of a tile of queries.
        """
        count = rows.count
        dim = kv.head_dim
        kernel = self._kernel(
            "attention_split", "attention_split", CACHE16=STORAGE[kv.dtype], WIDE_HEAD=dim
        )
        group = heads // kv.kv_heads
        tiles_per_group = _ceil_div(group, _ATTENTION_TILE)
        tile_heads = _ceil_div(group, tiles_per_group)
        run = min(rows.rows_per_slot, count)
        tiles = _ceil_div(count, run) * _ceil_div(run, _ATTENTION_TILE // tile_heads)
        head_tiles = kv.kv_heads * tiles_per_group
        blocks = _ATTENTION_BLOCKS // (tiles * head_tiles)
        grid = (tiles, head_tiles, max(1, min(blocks, parts)))
        args = (*args, run, tile_heads, self._attention_partials, self._attention_counters)
        lane.kernel(kernel, grid, _WARP_BLOCK, args, name="attention")

    def reserve_attention(self, rows: int, heads: int, kv: PagedKV) -> int:
        """Reserve the workspace of split attention for `rows` rows.

        Returns
        -------
        int
            Maximum number of parts into which the positions of a row are split; 0 for a KV cache
            whose attention does not run on tensor cores and needs no workspace.
        """
        if self._thread or kv.head_dim not in (64, 128) or kv.dtype == "float32":
            return 0
        parts = min(_ceil_div(kv.positions, _ATTENTION_SPLIT), _ATTENTION_MAX_PARTS)
        # A launch with more queries has so many tiles that one block computes all parts of a tile
        # and needs no workspace.
        queries = min(rows * heads, _ATTENTION_BLOCKS // 2 * _ATTENTION_TILE)
        size = parts * queries * (kv.head_dim + 4)
        partials = self._attention_partials
        if parts > 1 and (partials is None or partials.shape[0] < size):
            self._attention_partials = self.device.empty((size,), "float32")
        counters = self._attention_counters
        if counters is None or counters.shape[0] < rows * heads:
            self._attention_counters = self.device.zeros((rows * heads,), "int32")
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

        Before verification draft j of a tree is cached j positions after the root.

        Parameters
        ----------
        lane
            Lane that the kernels are added to.
        kv
            KV cache of the target; all layers are compacted.
        row_slot
            int32[B], slot of each batch row.
        result
            int32[B, row words], ``RoundRow`` of each batch row after verification, with the
            accepted drafts.
        features
            float32[R, columns], features, whose rows are moved like the KV entries; None if the
            drafter reads no features.
        first
            int32[B], first forward row of each batch row.
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
            row_args = (features, first, features.shape[1], row_slot, result, result.shape[1])
            lane.kernel(kernel, batch, block, row_args, name="compact features")

    # Elementwise kernels.

    def silu_mul(self, lane: Lane, gate_up: DeviceArray, out: DeviceArray) -> None:
        """Compute out = silu(gate) * up.

        Parameters
        ----------
        lane
            Lane that the kernel is added to.
        gate_up
            float32[R, 2 width].
        out
            [R, width], float32 or of `input_dtype`.
        """
        rows, width = out.shape
        expect("silu: gate_up", gate_up, "float32", R=rows, width=2 * width)
        expect("silu: out", out, out.dtype, R=rows, width=width)
        grid, block = self._elementwise_launch(rows, width, self._chunk)
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
        """Compute out[b] = x[index[b]] and, if requested, its norm.

        A row whose index is out of range becomes zero.

        Parameters
        ----------
        lane
            Lane that the kernel is added to.
        x
            [rows, width] of any float dtype.
        index
            int32[B].
        out
            float32[B, width].
        name
            Node name and prefix of error messages.
        norm
            Norm of the gathered rows, which the same kernel computes; None to compute no norm.
        """
        count, width = out.shape
        expect(f"{name}: index", index, "int32", B=count)
        expect(f"{name}: out", out, "float32", B=count, width=x.shape[1])
        if norm is not None:
            expect(f"{name}: norm", norm.weight, "float32", width=width)
            expect(f"{name}: norm output", norm.out, norm.out.dtype, B=count, width=width)
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
        grid, block = self._elementwise_launch(count, width, self._chunk)
        kernel = self._kernel("elements", "gather_rows", WEIGHT=_storage(x), CHUNK=self._chunk)
        lane.kernel(kernel, grid, block, (x, index, out, count, x.shape[0], width), name=name)

    def scale(self, lane: Lane, x: DeviceArray, factor: float, cap: float = 0.0) -> None:
        """Compute x = factor * x in place, and then x = cap * tanh(x / cap) if `cap` is not 0.

        Parameters
        ----------
        lane
            Lane that the kernel is added to.
        x
            float32[R, width].
        factor
            Multiplier.
        cap
            Soft cap; 0 for none.
        """
        rows, width = x.shape
        expect("scale: x", x, "float32", R=rows, width=width)
        grid, block = self._elementwise_launch(rows, width, self._chunk)
        kernel = self._kernel("elements", "scale_rows", WEIGHT="float", CHUNK=self._chunk)
        lane.kernel(kernel, grid, block, (x, rows, width, factor, cap), name="scale")

    def convolve(
        self,
        lane: Lane,
        x: DeviceArray,
        base: DeviceArray,
        dynamic: DeviceArray,
        kernel_index: int,
        row_stride: int,
        out: DeviceArray,
        residual: DeviceArray | None = None,
    ) -> None:
        """Convolve each row with the previous rows of its block (DFlash2) and add the residual.

        Parameters
        ----------
        lane
            Lane that the kernel is added to.
        x, out, residual
            float32[R, width].
        base
            float32[2, size, width], two static kernels per column. Element 0 of a kernel is the
            weight of the row itself, element o the weight of the o-th row before it.
        dynamic
            float32[R, 2 * size * groups], two dynamic kernels per row and group of adjacent
            columns, which are added to the static kernels.
        kernel_index
            Index of the kernel to use, 0 or 1.
        row_stride
            Distance between consecutive rows of a block of a block drafter, in rows of `x`.
        """
        rows, width = x.shape
        size = base.shape[1]
        groups = dynamic.shape[1] // (2 * size)
        expect("convolve: base", base, "float32", two=2, size=size, width=width)
        expect("convolve: dynamic", dynamic, "float32", R=rows, columns=2 * size * groups)
        for array in (x, out, residual):
            if array is not None:
                expect("convolve: rows", array, "float32", R=rows, width=width)
        grid, block = self._elementwise_launch(rows, width, self._chunk)
        kernel = self._kernel("elements", "convolve_rows", WEIGHT="float", CHUNK=self._chunk)
        sizes = (rows, width, size, groups, kernel_index, row_stride)
        args = (x, base, dynamic, residual, out, *sizes)
        lane.kernel(kernel, grid, block, args, name="convolution")

    def eagle_input(
        self,
        lane: Lane,
        token: DeviceArray,
        embedding: DeviceArray,
        hidden: DeviceArray,
        embedding_norm: DeviceArray,
        hidden_norm: DeviceArray,
        eps: float,
        norm_before_residual: bool,
        x: DeviceArray,
        residual: DeviceArray,
    ) -> None:
        """Compute x = [norm(embedding[token]), norm(hidden)] and the initial residual stream.

        Parameters
        ----------
        lane
            Lane that the kernel is added to.
        token
            int32[R].
        embedding
            [vocab, width] of any float dtype.
        hidden
            float32[R, width].
        embedding_norm, hidden_norm
            Weights of the two norms, float32[width].
        eps
            Constant added to the mean squares.
        norm_before_residual
            Whether the residual stream starts with norm(hidden) instead of hidden.
        x
            float32[R, 2 width], receives the two normed inputs.
        residual
            float32[R, width], receives the residual stream; may be `hidden`.
        """
        rows, width = hidden.shape
        expect("eagle input: token", token, "int32", R=rows)
        expect("eagle input: hidden", hidden, "float32", R=rows, width=embedding.shape[1])
        expect("eagle input: x", x, "float32", R=rows, width=2 * width)
        expect("eagle input: residual", residual, "float32", R=rows, width=width)
        expect("eagle input: embedding norm", embedding_norm, "float32", width=width)
        expect("eagle input: hidden norm", hidden_norm, "float32", width=width)
        kernel = self._kernel(
            "norm", "eagle_input", WEIGHT=_storage(embedding), NORM_THREADS=self._norm_block
        )
        args = (embedding, token, hidden, embedding_norm, hidden_norm, x, residual)
        sizes = (rows, embedding.shape[0], width, eps, int(norm_before_residual))
        lane.kernel(kernel, rows, self._norm_block, (*args, *sizes), name="eagle input")


def _kv_write_args(qkv: DeviceArray, write: KVWrite) -> tuple[object, ...]:
    """Return the arguments that kernels with RoPE and a KV cache write have in common."""
    kv = write.kv
    rows = write.rows
    width = (write.heads + 2 * kv.kv_heads) * kv.head_dim
    expect("rope: qkv", qkv, "float32", R=rows.count, heads=width)
    expect("rope: table", write.rope_table, "float32", positions=kv.positions, head_dim=kv.head_dim)
    return (
        write.rope_table,
        rows.slot,
        rows.pos,
        rows.ancestors,
        kv.page_table,
        kv.k[write.layer],
        kv.v[write.layer],
        write.heads,
        kv.kv_heads,
        kv.slots,
        kv.max_pages,
        kv.page_shift,
        kv.scratch_page,
    )


def _mma_dtype(dtype: str) -> str:
    """Return the dtype in which tensor cores multiply weights that are stored as `dtype`."""
    return "bfloat16" if dtype == E4M3 else dtype


def _storage(array: DeviceArray) -> str:
    """Return the C++ type of an array's elements, which selects the variant of a kernel."""
    names = {**STORAGE, E4M3: "e4m3_t"}
    if array.dtype not in names:
        raise ShapeError(f"weights are {array.dtype}, expected one of {sorted(names)}")
    return names[array.dtype]
