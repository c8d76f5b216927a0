"""Application of token bitmasks to logits."""

from __future__ import annotations

from graft.cudagraph.device import Device
from graft.cudagraph.driver.memory import DeviceArray, PinnedArray
from graft.cudagraph.errors import ShapeError
from graft.cudagraph.lanes import Lane
from graft.sampling.checks import check_range, expect
from graft.sampling.kernels.loader import load

__all__ = ["MaskApply"]

_THREADS = {"soft": 1, "cuda": 256}


class MaskApply:
    """Sets the logits of illegal tokens to -inf, in place.

    `block` is the number of threads per block: 1 or a multiple of 32; by default it depends on the
    device.
    """

    def __init__(self, device: Device, *, block: int | None = None) -> None:
        self._block = _THREADS[device.kind] if block is None else block
        kernels = load(device, "mask", self._block)
        self._kernels = {}
        for dtype in ("float32", "float16", "bfloat16"):
            self._kernels[dtype] = kernels[f"mask_apply_{dtype}"]

    def __call__(
        self,
        lane: Lane,
        logits: DeviceArray,
        mask: DeviceArray | PinnedArray,
        *,
        mask_row: DeviceArray | None = None,
        d2t: DeviceArray | None = None,
        token_limit: int | None = None,
    ) -> None:
        """Add to a lane the kernel that sets the logits of illegal tokens to -inf.

        Parameters
        ----------
        logits
            float32, float16 or bfloat16 [R, C]; changed in place.
        mask
            int32 [N, W]. Bit ``t % 32`` of word ``t // 32`` is 1 if target id t is legal.
        mask_row
            int32 [R], index into `mask` for each row of logits. A negative index leaves that row of
            logits unchanged. Default: row r of `logits` uses row r of `mask`.
        d2t
            int32 [C], target id of each column of `logits`. Columns whose id is negative or not
            below `token_limit` are illegal. Default: column c belongs to id c.
        token_limit
            Ids at or above it are illegal. Default: ``min(32 W, C)``, or 32 W with `d2t`.
        """
        if len(logits.shape) != 2 or len(mask.shape) != 2:
            raise ShapeError(
                "logits [R, C] and mask [N, W] must have two dimensions, got "
                f"{tuple(logits.shape)} and {tuple(mask.shape)}"
            )
        rows, columns = logits.shape
        masks, words = mask.shape
        expect("logits", logits, tuple(self._kernels), R=rows, C=columns)
        expect("mask", mask, ("int32", "uint32"), N=masks, W=words)
        if mask_row is not None:
            expect("mask_row", mask_row, "int32", R=rows)
        elif masks < rows:
            raise ShapeError(f"mask has N={masks} rows for R={rows} rows of logits: pass mask_row")
        if d2t is not None:
            expect("d2t", d2t, "int32", C=columns)
        max_ids = 32 * words if d2t is not None else min(32 * words, columns)
        if d2t is None and 32 * words < columns and token_limit is None:
            raise ShapeError(
                f"mask has W={words} words for {32 * words} ids, but logits have C={columns} "
                "columns: pass token_limit"
            )
        limit = max_ids if token_limit is None else token_limit
        check_range("token_limit", limit, 1, max_ids)
        if rows == 0:
            return
        chunks = 1
        if self._block > 1:
            columns_per_chunk = max(self._block, 32)
            chunks = min(-(-columns // columns_per_chunk), 64)
            chunks = max(chunks, 1)
        lane.kernel(
            self._kernels[logits.dtype],
            (chunks, rows, 1),
            self._block,
            [logits, columns, mask, words, mask_row, d2t, limit],
            name="mask logits",
        )
