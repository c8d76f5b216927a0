"""Matrix sizes, KV caches and rows that several sections use."""

from __future__ import annotations

from typing import Any

import numpy as np

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.lanes import StreamLane
from graft.models.cache.kv import PagedKV
from graft.models.llm.kernels.library import ModelKernels
from graft.models.llm.rows import Rows
from graft.tools.gpu_first.session import Session

PAGE_SIZE = 16


def matrices(shape: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return the size of each weight matrix of the model: output features and input features."""
    hidden = shape["hidden_size"]
    inner = shape["intermediate_size"]
    kv = 2 * shape["num_key_value_heads"] * shape["head_dim"]
    return {
        "qkv": (hidden + kv, hidden),
        "out": (hidden, hidden),
        "gate, up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (shape["vocab_size"], hidden),
    }


def random_input(
    session: Session, kernels: ModelKernels, weight: DeviceArray, rows: int
) -> DeviceArray:
    """Return random activations in the dtype that a product with `weight` reads fastest."""
    shape = (rows, weight.shape[1])
    if kernels.products.input_dtype(weight) == "bfloat16":
        return session.random(shape)
    return session.random_float32(shape)


def random_kv(session: Session, length: int, layers: int, slots: int) -> PagedKV:
    """Return a KV cache with the entries of `slots` requests, `length` random entries for each."""
    kv = PagedKV(
        session.device,
        layers=layers,
        pages=slots * length // PAGE_SIZE,
        page_size=PAGE_SIZE,
        kv_heads=session.shape["num_key_value_heads"],
        head_dim=session.shape["head_dim"],
        dtype="bfloat16",
        slots=slots,
        max_pages_per_slot=length // PAGE_SIZE,
    )
    kv.k = session.random(kv.k.shape)
    kv.v = session.random(kv.v.shape)
    for slot in range(slots):
        kv.allocate(slot, length)
        kv.set_table(StreamLane(session.stream), slot)
    return kv


def attention_rows(device: Any, length: int, count: int, per_slot: int = 4) -> Rows:
    """Return `count` forward rows: `per_slot` rows of slot 0, then those of slot 1, and so on.

    The rows of a slot are at the last positions of a context of `length` tokens.
    """
    index = np.arange(count)
    run = min(count, per_slot)
    slots = (index // per_slot).astype(np.int32)
    positions = (length - run + index % per_slot).astype(np.int32)
    return Rows(
        device.from_host(slots),
        device.from_host(slots),
        device.from_host(positions),
        rows_per_slot=run,
    )
