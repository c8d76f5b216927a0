"""Operands of the model kernels: norms, and the destination of keys and values."""

from __future__ import annotations

from typing import NamedTuple

from graft.cudagraph.driver.memory import DeviceArray
from graft.models.cache.kv import PagedKV
from graft.models.llm.rows import Rows
from graft.sampling.checks import expect

NORM_GROUP = 16  # minimum number of output columns per sum of squares of a folded norm


class Norm(NamedTuple):
    """RMSNorm between a product that writes rows and a product that reads the normed rows.

    A norm whose `square_sums` is not None is folded into the two products and needs no kernel of
    its own. The product that writes the rows is the producer; the product that reads the normed
    rows is the consumer. The producer multiplies its rows by `weight`, writes them to `out`, and
    writes the sums of the squares of its rows to `square_sums`. The consumer computes the root mean
    square of each row from these sums and divides its own results by the root mean square.
    """

    weight: DeviceArray  # float32[width]
    eps: float  # added to the mean square
    out: DeviceArray  # [R, width] in the dtype that the consumer reads
    square_sums: DeviceArray | None = None  # float32[R, width / NORM_GROUP], workspace


class HeadNorms(NamedTuple):
    """RMSNorms of every query head and of every key head, with weights float32[head_dim]."""

    query: DeviceArray
    key: DeviceArray
    eps: float


class KVWrite(NamedTuple):
    """Destination of a layer's keys and values, and the RoPE table for its queries and keys."""

    rope_table: DeviceArray  # float32[positions, head_dim] of `Rope.table`
    rows: Rows  # slot and position of each row
    kv: PagedKV
    layer: int
    heads: int  # number of query heads; queries are rotated but not cached

    def kernel_args(self, qkv: DeviceArray) -> tuple[object, ...]:
        """Check `qkv` and return arguments of a kernel that applies RoPE and writes the cache."""
        kv = self.kv
        rows = self.rows
        dim = kv.head_dim
        width = (self.heads + 2 * kv.kv_heads) * dim
        expect("rope: qkv", qkv, "float32", R=rows.count, heads=width)
        expect("rope: table", self.rope_table, "float32", positions=kv.positions, head_dim=dim)
        return (
            self.rope_table,
            rows.slot,
            rows.pos,
            rows.ancestors,
            kv.page_table,
            kv.k[self.layer],
            kv.v[self.layer],
            self.heads,
            kv.kv_heads,
            kv.slots,
            kv.max_pages,
            kv.page_shift,
            kv.scratch_page,
        )


#: Arguments of a product that does not write to the KV cache, in place of `KVWrite.kernel_args`:
#: seven null pointers and six sizes of 0.
NO_KV_WRITE: tuple[object, ...] = (None,) * 7 + (0,) * 6
