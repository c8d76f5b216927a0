"""Launch the attention of one layer, for tests that count what its kernels execute.

Usage: ``attention_launch.py JSON`` with the arguments of `launch`.
"""

import json
import sys

import numpy as np

from graft.cudagraph.device import open_device
from graft.cudagraph.lanes import StreamLane
from graft.models.cache.kv import PagedKV
from graft.models.llm.kernels.library import ModelKernels
from graft.models.llm.rows import Rows


def launch(slots, positions, heads=4, kv_heads=1, dim=64, rows_per_slot=1, dtype="float32"):
    """Run attention over rows with the given slots and positions; keys and values are zero."""
    device = open_device()
    longest = max(positions) + 1
    kv = PagedKV(
        device,
        layers=1,
        pages=(max(slots) + 1) * -(-longest // 64),
        page_size=64,
        kv_heads=kv_heads,
        head_dim=dim,
        dtype="bfloat16",
        slots=max(slots) + 1,
        max_pages_per_slot=-(-longest // 64),
    )
    lengths = {}
    for slot, position in zip(slots, positions, strict=True):
        lengths[slot] = max(lengths.get(slot, 0), position + 1)
    for slot, length in lengths.items():
        assert kv.allocate(slot, length)
    table = np.zeros(kv.page_table.shape, np.int32)
    for slot in lengths:
        pages = kv.pages_of(slot)
        table[slot, : len(pages)] = pages
    kv.page_table.copy_from(table)
    kv.k.copy_from(np.zeros(kv.k.shape, np.uint16))
    kv.v.copy_from(np.zeros(kv.v.shape, np.uint16))
    count = len(positions)
    qkv = device.zeros((count, (heads + 2 * kv_heads) * dim), "float32")
    out = device.zeros((count, heads * dim), dtype)
    slot_array, pos_array = (
        device.from_host(np.array(values, np.int32)) for values in (slots, positions)
    )
    rows = Rows(slot_array, slot_array, pos_array, rows_per_slot=rows_per_slot)
    attention = ModelKernels(device, "warp").attention
    stream = device.stream("attention")
    lane = StreamLane(stream)
    plan = attention.plan(lane, rows, kv, heads)
    attention.attend(lane, qkv, plan, kv, 0, out)
    stream.synchronize()
    stream.close()


if __name__ == "__main__":
    launch(**json.loads(sys.argv[1]))
