"""Matrix products with their epilogues: residual, bias, norm, gate, RoPE.

The ``warp`` form of the kernels runs a matrix product on tensor cores if three conditions hold. The
weights are 16-bit floats, or 8-bit weights that are converted to bfloat16 when they are loaded. The
inner size is a multiple of 128. The number of output columns is a multiple of 16.

Activations are float32. For tensor cores they are rounded to the dtype of the weights, as is usual
in training and serving. With ``activations="float32"`` each activation is instead split into two
numbers of that dtype, the rounded value and the remainder. Together the two numbers have 16 bits of
mantissa with bfloat16 and 22 bits with float16. Sums are accumulated in float32.

All products on tensor cores use the same workspace, so they must run in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from graft.cudagraph.driver.dtypes import E4M3, itemsize
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.errors import OptionError, ShapeError
from graft.cudagraph.lanes import Lane
from graft.models.cache.kv import STORAGE
from graft.models.llm.kernels import tensor_cores
from graft.models.llm.kernels.elementwise import Elementwise
from graft.models.llm.kernels.loader import KernelLoader, ceil_div, storage_type
from graft.models.llm.kernels.norms import Norms
from graft.models.llm.kernels.operands import NO_KV_WRITE, NORM_GROUP, KVWrite, Norm
from graft.models.llm.weights import Matrix, ScaledMatrix
from graft.sampling.checks import expect

ACTIVATIONS = ("rounded", "float32")

# Tile and block sizes. They must match the constants in the kernels.
_THREAD_COLUMNS = 64
_THREAD_ROWS = 48
_WARP_BLOCK = 128
_WARP_COLUMNS = 2 * _WARP_BLOCK // 32
_WARP_ROWS = 8


@dataclass(frozen=True)
class _Product:
    """Checked operands of x W^T.

    The product has `rows` input rows, and `inner` elements per dot product. `x` is float32 or, if
    `x_is_rounded`, already has the 16-bit dtype in which tensor cores multiply. `scale` and `bias`
    are float32[columns] or None. `square_sums` and `eps` belong to the norm that is folded into
    `x`; they are None and 0 without a folded norm.
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


class Products:
    """Matrix products, and the rules that select kernels and fusions for them.

    `activations` is the precision of the activations on tensor cores, ``rounded`` or ``float32``.
    """

    def __init__(
        self, loader: KernelLoader, activations: str, norms: Norms, elementwise: Elementwise
    ) -> None:
        if activations not in ACTIVATIONS:
            raise OptionError(f"activations {activations!r}: expected one of {ACTIVATIONS}")
        self._loader = loader
        self._norms = norms
        self._elementwise = elementwise
        self._splits_activations = activations == "float32"
        # Shared memory that a block may use, including the static shared memory of its kernel.
        max_shared = loader.device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self._allows_tall_tiles = max_shared >= tensor_cores.TALL_SHARED
        self._workspace: dict[str, DeviceArray] = {}

    # Selection rules.

    def uses_tensor_cores(self, dtype: str, columns: int, inner: int) -> bool:
        """Return whether a product with a weight of this dtype and shape runs on tensor cores."""
        fits = inner % tensor_cores.INNER_MULTIPLE == 0
        fits = fits and columns % tensor_cores.COLUMN_MULTIPLE == 0
        return not self._loader.is_thread and fits and dtype != "float32"

    def input_dtype(self, weight: Matrix) -> str:
        """Return the dtype that `linear` reads fastest for `weight`.

        An input that was rounded to this dtype gives the same bits as the float32 input, because
        `linear` rounds float32 inputs to the same dtype.
        """
        if not self._splits_activations and self.uses_tensor_cores(weight.dtype, *weight.shape):
            return _mma_dtype(weight.dtype)
        return "float32"

    def can_fold_norm(self, producer: Matrix, consumer: Matrix) -> bool:
        """Return whether the norm between the products `producer` and `consumer` can be folded.

        `Norm` describes folded norms. Both products must run on tensor cores. With float16 weights,
        a norm cannot be folded, because values that are not yet divided by the root mean square may
        exceed the range of float16. If `producer` is a row-parallel shard, the norm cannot be
        folded, because the sums are complete only after the all-gather.
        """
        if isinstance(producer, ScaledMatrix) and producer.all_gather is not None:
            return False
        return all(
            weight.dtype != "float16" and self.uses_tensor_cores(weight.dtype, *weight.shape)
            for weight in (producer, consumer)
        )

    def gate_interleave(self, dtype: str, columns: int, inner: int) -> int:
        """Return the group size with which the rows of a gate and up weight are interleaved.

        The first half of each group are gate rows, the second half are up rows; see
        `Weights.stacked`. Return 0, which means no interleaving, if `gated_linear` needs two
        kernels for this weight.
        """
        return columns if self.uses_tensor_cores(dtype, columns, inner) else 0

    def can_fuse_rope(self, head_dim: int, dtype: str, columns: int, inner: int) -> bool:
        """Return whether a QKV product with this weight can also apply RoPE and write the cache."""
        fits = head_dim % tensor_cores.COLUMN_MULTIPLE == 0
        return fits and self.uses_tensor_cores(dtype, columns, inner)

    # Operations.

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
        x
            [R, inner], float32 or of `input_dtype`; or the `Norm` that another product wrote.
        weight
            [columns, inner], float32, float16, bfloat16 or E4M3 without NaN. If it has row scales,
            the sums are multiplied by them. If it has a bias, the bias is then added, before the
            residual. For a row-parallel shard the partial products of all ranks are added in rank
            order, and then the residual. No kernel of the lane may write `weight`: with
            programmatic dependent launch, weights are loaded while the previous kernel runs.
        out
            float32[R, columns], receives the result.
        residual
            float32[R, columns], which may be `out`; None adds nothing.
        copy_to
            Array float32[R, stride] that receives a copy of the result, and the first column to
            write; None for no copy.
        norm
            Norm of the result for the next product, which may be folded into this product (`Norm`);
            None to compute no norm.
        name
            Node name and prefix of error messages.

        Raises
        ------
        ShapeError
            If an operand has the wrong shape or dtype, or the norm is folded and the product does
            not run on tensor cores.
        """
        folded = None
        if isinstance(weight, ScaledMatrix) and weight.all_gather is not None:
            self._linear_row_parallel(lane, x, weight, out, residual, copy_to, name)
        else:
            product = self._check(x, weight, name)
            expect(f"{name}: out", out, "float32", R=product.rows, columns=product.columns)
            if residual is not None:
                shape = {"R": product.rows, "columns": product.columns}
                expect(f"{name}: residual", residual, "float32", **shape)
            if norm is not None and norm.square_sums is not None:
                self._check_folded_norm(product, norm, weight, name)
                folded = norm
            args = _common_args(product, out, residual, copy_to, name)
            if product.tensor_cores:
                self._launch_mma(lane, product, out, args, name, norm=folded)
            else:
                self._launch_without_tensor_cores(lane, product, args, name)
        if norm is not None and folded is None:
            self._norms.rms_norm(lane, out, norm.weight, norm.eps, norm.out)

    def gated_linear(
        self,
        lane: Lane,
        x: DeviceArray | Norm,
        weight: Matrix,
        out: DeviceArray,
        scratch: DeviceArray | None = None,
        name: str = "linear",
    ) -> None:
        """Compute out = silu(x G^T) * (x U^T): a gated MLP before its down projection.

        If `gate_interleave` returns a group size for the weight, this is one kernel. Otherwise it
        is `linear` and `Elementwise.silu_mul`, which need `scratch` float32[R, columns]. `x` is as
        in `linear`; `out` is [R, columns / 2] of any dtype.

        `weight` [columns, inner] contains the gate projection G and the up projection U, in the
        layout that `gate_interleave` selects. An operand of the wrong shape or dtype, or a missing
        scratch, raises ShapeError.
        """
        if scratch is not None and not self.uses_tensor_cores(weight.dtype, *weight.shape):
            self.linear(lane, x, weight, scratch, name=name)
            self._elementwise.silu_mul(lane, scratch, out)
            return
        product = self._check(x, weight, name)
        expect(f"{name}: out", out, out.dtype, R=product.rows, columns=product.columns >> 1)
        self._require_tensor_cores(product, "a gated product without scratch", name)
        args = _common_args(product, out, None, None, name)
        self._launch_mma(lane, product, out, args, name, gated=True)

    def fused_qkv(
        self, lane: Lane, x: DeviceArray | Norm, weight: Matrix, qkv: DeviceArray, write: KVWrite
    ) -> None:
        """Do the work of `Attention.project_qkv` in one kernel.

        The rows of each head in `weight` must be interleaved (`Attention.qkv_interleave`).
        """
        name = "qkv"
        store_args = write.kernel_args(qkv)
        product = self._check(x, weight, name)
        expect(f"{name}: out", qkv, "float32", R=product.rows, columns=product.columns)
        args = _common_args(product, qkv, None, None, name)
        types = {"ROPE_HEAD_DIM": write.kv.head_dim, "CACHE": STORAGE[write.kv.dtype]}
        self._launch_mma(lane, product, qkv, args, name, store_args=store_args, store_types=types)

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
        self._elementwise.add_partials(lane, partials, residual, out, copy_to)

    # Checks.

    def _check(self, x: DeviceArray | Norm, weight: Matrix, name: str) -> _Product:
        """Check the operands of x W^T and decide whether the product runs on tensor cores."""
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
        """Raise a ShapeError that names the feature `what` unless tensor cores run the product."""
        if not product.tensor_cores:
            raise ShapeError(
                f"{name}: {what} requires tensor cores, which kernel form {self._loader.form!r} "
                f"does not use for a {product.weight.dtype}[{product.columns}, {product.inner}] "
                "weight"
            )

    def _check_folded_norm(self, product: _Product, norm: Norm, weight: Matrix, name: str) -> None:
        """Check that a product can compute a folded norm of its result; check the norm's arrays.

        linear_mma.cuh describes folded norms.
        """
        self._require_tensor_cores(product, "a folded norm", name)
        assert norm.square_sums is not None
        rows = product.rows
        columns = product.columns
        groups = columns // NORM_GROUP
        expect(f"{name}: norm", norm.weight, "float32", columns=columns)
        expect(f"{name}: norm output", norm.out, self.input_dtype(weight), R=rows, columns=columns)
        expect(f"{name}: square sums", norm.square_sums, "float32", R=rows, groups=groups)

    # Launches.

    def _launch_without_tensor_cores(
        self, lane: Lane, product: _Product, args: tuple[object, ...], name: str
    ) -> None:
        if self._loader.is_thread:
            across = ceil_div(product.columns, _THREAD_COLUMNS)
            grid = (across, ceil_div(product.rows, _THREAD_ROWS), 1)
            block = 1
        else:
            across = ceil_div(product.columns, _WARP_COLUMNS)
            grid = (across, ceil_div(product.rows, _WARP_ROWS), 1)
            block = _WARP_BLOCK
        kernel = self._loader.load_form("linear", WEIGHT=storage_type(product.weight))
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
        store_args: tuple[object, ...] = NO_KV_WRITE,
        store_types: dict[str, object] | None = None,
    ) -> None:
        """Launch a tensor-core product with an epilogue, the code that stores the results.

        `args` is the result of `_common_args`. `norm` is a folded norm whose inputs the epilogue
        writes, or None. If `gated`, the epilogue computes silu(gate) * up. `store_args` and
        `store_types` are the arguments and macros of an epilogue that applies RoPE and writes the
        KV cache.
        """
        defines: dict[str, object] = {
            "SPLIT_X": int(self._splits_activations),
            "WEIGHT16": STORAGE[_mma_dtype(product.weight.dtype)],
            "X16": int(product.x_is_rounded),
            "WEIGHT8": int(product.weight.dtype == E4M3),
            "BIAS": int(product.bias is not None),
            "GATED": int(gated),
            "OUT": storage_type(out),
        }
        norm_args: tuple[object, ...] = (None, None, None)
        if norm is not None:
            norm_args = (norm.weight, norm.out, norm.square_sums)
        shape = tensor_cores.mma_shape(
            product.rows << self._splits_activations,
            product.columns,
            itemsize(product.weight.dtype),
            inner=product.inner,
            allow_tall=product.x_is_rounded and self._allows_tall_tiles,
        )
        defines |= (store_types or {}) | shape.defines
        kernel = self._loader.load(shape.kernel, shape.kernel, **defines)
        args = (*args, product.square_sums, product.eps, *norm_args, *store_args)
        if shape.kernel == "linear_many":
            partials = self._zeroed_workspace("float32", shape.partials)
            counters = self._zeroed_workspace("int32", shape.counters)
            args = (*args, partials, counters)
        lane.kernel(kernel, shape.grid, shape.block, args, shared=shape.shared, name=name)

    def _zeroed_workspace(self, dtype: str, size: int) -> DeviceArray | None:
        """Return workspace of at least `size` elements for split-K kernels, or None if `size` is 0.

        All calls share the workspace. It is zeroed only when it is allocated, because the kernels
        write partial sums before they read them, and reset their counters to zero.
        """
        if size == 0:
            return None
        workspace = self._workspace.get(dtype)
        if workspace is None or workspace.shape[0] < size:
            workspace = self._loader.device.zeros((size,), dtype)
            self._workspace[dtype] = workspace
        return workspace


def _common_args(
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
                f"{name}: copy_to columns {offset}..{offset + columns} are outside stride={stride}"
            )
    operands = (product.weight, product.scale, product.bias, product.x, residual, out, copy)
    return (*operands, rows, columns, product.inner, offset, stride)


def _mma_dtype(dtype: str) -> str:
    """Return the dtype in which tensor cores multiply weights that are stored as `dtype`."""
    return "bfloat16" if dtype == E4M3 else dtype
