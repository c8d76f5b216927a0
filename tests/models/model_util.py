"""Helper functions of the model tests: arrays, KV caches, rows and forward passes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graft.cudagraph.kernels.ptx import soft_device_runs_ptx
from graft.cudagraph.lanes import StreamLane
from graft.models.cache.kv import PagedKV
from graft.models.drafters.eagle3 import Eagle3Head
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import Eagle3Config, LlamaConfig
from graft.models.llm.kernels import loader
from graft.models.llm.llama import LlamaModel
from graft.models.llm.rows import Rows

_RUNS_GPU_CODE = os.environ.get("GRAFT_DEVICE") == "cuda" or soft_device_runs_ptx()
FORMS = loader.FORMS["cuda" if _RUNS_GPU_CODE else "soft"]
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return standard normal float32 values."""
    return rng.standard_normal(shape).astype(np.float32)


def upload(device: Any, x: np.ndarray, dtype: str = "float32") -> Any:
    """Upload float32 values as `dtype`."""
    return device.from_host(np.ascontiguousarray(x, dtype=np.float32), dtype)


def upload_ints(device: Any, values: Sequence[int] | np.ndarray) -> Any:
    """Upload an int32 array."""
    return device.from_host(np.asarray(values, dtype=np.int32))


def download(stream: Any, array: Any) -> np.ndarray:
    """Synchronize and return the contents of a device array."""
    stream.synchronize()
    return array.to_host()


def make_rows(device: Any, token: Any, slot: Any, pos: Any) -> Rows:
    """Create rows from host lists; a scalar slot applies to all rows."""
    count = len(token)
    slots = np.broadcast_to(np.asarray(slot, dtype=np.int32), (count,))
    return Rows(upload_ints(device, token), upload_ints(device, slots), upload_ints(device, pos))


def make_cache(device: Any, config: Any, layers: int | None = None, **changes: Any) -> PagedKV:
    """Create a KV cache for a model, by default with 3 slots of 64 positions in pages of 8."""
    sizes = {"pages": 40, "page_size": 8, "slots": 3, "max_pages_per_slot": 8, **changes}
    of_model = {
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "layers": layers or config.num_hidden_layers,
        "dtype": config.dtype,
    }
    return PagedKV(device, **{**of_model, **sizes})


def load_llama(
    device: Any,
    folder: Path,
    *,
    form: str | None = None,
    activations: str = "rounded",
    weights: str = "checkpoint",
    max_rows: int = 64,
    max_length: int = 64,
    **cache: Any,
) -> LlamaModel:
    """Load a target with its own KV cache."""
    config = LlamaConfig.from_dir(folder).for_length(max_length, folder)
    kv = make_cache(device, config, **cache)
    return LlamaModel(
        device,
        config,
        Checkpoint(folder),
        kv,
        max_rows=max_rows,
        form=form,
        activations=activations,
        weights=weights,
    )


def load_eagle3(
    device: Any, folder: Path, target: LlamaModel, *, max_rows: int = 64, **cache: Any
) -> Eagle3Head:
    """Load an EAGLE-3 head with its own KV cache and set the feature layers of the target."""
    config = Eagle3Config.from_dir(folder)
    kv = make_cache(device, config, config.num_hidden_layers, **cache)
    head = Eagle3Head(device, config, Checkpoint(folder), target, kv, max_rows=max_rows)
    target.set_feature_layers(head.feature_layers)
    return head


def allocate_pages(stream: Any, kv: PagedKV, slot: int, positions: int) -> None:
    """Allocate the pages of a slot's first positions and update the page table on the device."""
    assert kv.allocate(slot, positions)
    kv.set_table(StreamLane(stream), slot)


def forward(
    stream: Any, model: LlamaModel, token: Any, slot: Any, pos: Any, features: Any = None
) -> np.ndarray:
    """Run a forward pass on a stream and return logits [R, vocab]."""
    lane = StreamLane(stream)
    rows = make_rows(model.device, token, slot, pos)
    logits = model.device.empty((rows.count, model.vocab_size), "float32")
    model.forward(lane, rows, features, logits)
    stream.synchronize()
    return logits.to_host()


def read_cache(kv: PagedKV, slot: int, positions: int) -> np.ndarray:
    """Return the bits of a slot's keys and values, [2, layers, positions, kv_heads, head_dim]."""
    pages = list(kv.pages_of(slot))
    both = np.stack([kv.k.to_host(), kv.v.to_host()])[:, :, pages]
    layers = both.shape[1]
    return both.reshape(2, layers, -1, kv.kv_heads, kv.head_dim)[:, :, :positions].copy()


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays are equal bit for bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
