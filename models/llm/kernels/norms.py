"""RMSNorms of rows and of attention heads."""

from __future__ import annotations

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.lanes import Lane
from graft.models.llm.kernels.loader import KernelLoader, storage_type
from graft.models.llm.kernels.operands import HeadNorms, Norm
from graft.sampling.checks import expect


class Norms:
    """Norm kernels, with one block per row or head."""

    def __init__(self, loader: KernelLoader) -> None:
        self._loader = loader
        self._block = loader.norm_block

    def rms_norm(
        self, lane: Lane, x: DeviceArray, weight: DeviceArray, eps: float, out: DeviceArray
    ) -> None:
        """Compute the RMSNorm of each row of `x`, float32[R, width].

        `out` [R, width] is float32 or has the dtype `Products.input_dtype` of the product that
        reads `out`.
        """
        rows, width = x.shape
        expect("norm: x", x, "float32", R=rows, width=width)
        expect("norm: weight", weight, "float32", width=width)
        expect("norm: out", out, out.dtype, R=rows, width=width)
        kernel = self._loader.load(
            "norm", "norm_rows", WEIGHT="float", OUT=storage_type(out), NORM_THREADS=self._block
        )
        lane.kernel(kernel, rows, self._block, (x, weight, out, rows, width, eps), name="norm")

    def head_norm(self, lane: Lane, qkv: DeviceArray, norms: HeadNorms, heads: int) -> None:
        """Compute the RMSNorm of each query head and key head in place.

        `qkv` is float32[R, (heads + 2 kv_heads) * head_dim], with `heads` query heads.
        """
        rows, width = qkv.shape
        dim = norms.query.shape[0]
        kv_heads = (width // dim - heads) // 2
        expect("head norm: qkv", qkv, "float32", R=rows, width=(heads + 2 * kv_heads) * dim)
        for weight in (norms.query, norms.key):
            expect("head norm: weight", weight, "float32", D=dim)
        block = 1 if self._loader.is_thread else 32
        kernel = self._loader.load("norm", "head_norm", WEIGHT="float", NORM_THREADS=block)
        args = (qkv, norms.query, norms.key, rows, heads, kv_heads, dim, norms.eps)
        lane.kernel(kernel, rows * (heads + kv_heads), block, args, name="head norm")

    def gather_norm(
        self,
        lane: Lane,
        x: DeviceArray,
        index: DeviceArray,
        out: DeviceArray,
        norm: Norm,
        name: str,
    ) -> None:
        """Compute out[b] = x[index[b]] and the norm of `out`; used by `Elementwise.gather`."""
        count, width = out.shape
        expect(f"{name}: norm", norm.weight, "float32", width=width)
        expect(f"{name}: norm output", norm.out, norm.out.dtype, B=count, width=width)
        kernel = self._loader.load(
            "norm",
            "gather_norm",
            WEIGHT=storage_type(x),
            OUT=storage_type(norm.out),
            NORM_THREADS=self._block,
        )
        args = (x, index, out, norm.weight, norm.out, x.shape[0], width, norm.eps)
        lane.kernel(kernel, count, self._block, args, name=name)

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
        token
            int32[R].
        embedding
            [vocab, width] of any float dtype.
        hidden
            float32[R, width].
        embedding_norm, hidden_norm
            Weights of the two norms, float32[width].
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
        kernel = self._loader.load(
            "norm", "eagle_input", WEIGHT=storage_type(embedding), NORM_THREADS=self._block
        )
        args = (embedding, token, hidden, embedding_norm, hidden_norm, x, residual)
        sizes = (rows, embedding.shape[0], width, eps, int(norm_before_residual))
        lane.kernel(kernel, rows, self._block, (*args, *sizes), name="eagle input")
