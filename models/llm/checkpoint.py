"""Reading of safetensors checkpoints through memory-mapped files.

A checkpoint is one file or several shards. A safetensors file has three parts: an 8-byte
little-endian header length, a JSON header of ``name -> {dtype, shape, data_offsets}``, and the
bytes of the tensors. NumPy has no bfloat16, so tensors of this dtype are returned as their
16-bit patterns.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from graft.cudagraph.driver.dtypes import E4M3
from graft.models.errors import CheckpointError, ConfigError
from graft.models.json_fields import read_json

FLOATS = ("float32", "float16", "bfloat16")
# Maps a safetensors dtype to graft's dtype name and to the NumPy dtype of the stored bits.
_DTYPES = {
    "F32": ("float32", "<f4"),
    "F16": ("float16", "<f2"),
    "BF16": ("bfloat16", "<u2"),
    "F8_E4M3": (E4M3, "u1"),
    "I64": ("int64", "<i8"),
    "I32": ("int32", "<i4"),
    "U64": ("uint64", "<u8"),
    "U32": ("uint32", "<u4"),
    "U8": ("uint8", "u1"),
    "BOOL": ("uint8", "u1"),
}


@dataclass(frozen=True)
class _Entry:
    """Location of one tensor: its file and its byte range in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """Tensors of a model folder or of one safetensors file, by name.

    A folder has ``model.safetensors.index.json`` and the shards that it lists, or no index and
    ``model.safetensors``. The constructor reads and checks every header, so a damaged checkpoint
    (files missing, truncated or inconsistent) raises CheckpointError before any tensor is read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._entries: dict[str, _Entry] = {}
        self._maps: dict[Path, np.memmap[Any, Any]] = {}
        if self.path.is_file():
            self._entries = _read_header(self.path)
            return
        single = self.path / "model.safetensors"
        index = self.path / "model.safetensors.index.json"
        # The index takes precedence, because a model.safetensors in the same folder may belong to
        # another model.
        if index.exists():
            self._entries = _read_shards(index)
        elif single.is_file():
            self._entries = _read_header(single)
        elif any(self.path.glob("*.bin")):
            raise CheckpointError(
                f"{self.path}: found only pickled weights (.bin), which graft does not read; "
                "convert them once with safetensors.torch.save_file(torch.load(file, "
                "weights_only=True), 'model.safetensors')"
            )
        else:
            raise CheckpointError(
                f"{self.path}: neither model.safetensors nor model.safetensors.index.json exists"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(self._entries))

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def get(
        self, name: str, shape: tuple[int, ...] | None = None, dtypes: tuple[str, ...] = FLOATS
    ) -> tuple[np.ndarray, str]:
        """Return a tensor as stored, and the name of its dtype.

        The array is a read-only view of the mapped file. bfloat16 is returned as uint16 bit
        patterns, E4M3 and booleans as uint8. CheckpointError is raised if the tensor is missing,
        does not have `shape` (None allows any), or has none of the `dtypes`.
        """
        entry = self._entry(name)
        if entry.dtype not in _DTYPES:
            raise CheckpointError(
                f"{entry.file}: {name} has dtype {entry.dtype}, which graft does not read"
            )
        dtype, storage = _DTYPES[entry.dtype]
        if dtype not in dtypes:
            raise CheckpointError(
                f"{entry.file}: {name} has dtype {dtype}, expected {' or '.join(dtypes)}"
            )
        if shape is not None and entry.shape != tuple(shape):
            raise CheckpointError(
                f"{entry.file}: {name} has shape {list(entry.shape)}, expected {list(shape)}"
            )
        raw = self._map(entry.file)[entry.begin : entry.end]
        return raw.view(storage).reshape(entry.shape), dtype

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: tensor {name} is missing") from None

    def _map(self, file: Path) -> np.memmap[Any, Any]:
        """Return the bytes of a file, mapped on first use."""
        if file not in self._maps:
            try:
                self._maps[file] = np.memmap(file, dtype=np.uint8, mode="r")
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{file}: cannot be mapped ({error})") from error
        return self._maps[file]


def _read_shards(index: Path) -> dict[str, _Entry]:
    """Read the index of a sharded checkpoint and the headers of its shards."""
    try:
        weight_map = read_json(index)["weight_map"]
        pairs = [(str(name), str(file)) for name, file in weight_map.items()]
    except ConfigError as error:
        raise CheckpointError(f"{error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not a valid shard index ({error!r})") from error
    shards: dict[str, dict[str, _Entry]] = {}
    entries: dict[str, _Entry] = {}
    for name, file in pairs:
        if Path(file).name != file or len(file) > 255 or "\0" in file:
            raise CheckpointError(f"{index}: shard name {file[:80]!r} is not a plain file name")
        if file not in shards:
            if not (index.parent / file).is_file():
                raise CheckpointError(f"{index.parent}: shard {file} is missing")
            shards[file] = _read_header(index.parent / file)
        if name not in shards[file]:
            raise CheckpointError(f"{index}: tensor {name} is not in shard {file}")
        entries[name] = shards[file][name]
    return entries


def _read_header(file: Path) -> dict[str, _Entry]:
    """Read the header of one safetensors file, after `safe_open` has checked it."""
    try:
        with safe_open(file, "numpy"), file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error
    header.pop("__metadata__", None)
    entries = {}
    for name, spec in header.items():
        begin, end = (8 + length + offset for offset in spec["data_offsets"])
        entries[name] = _Entry(file, spec["dtype"], tuple(spec["shape"]), begin, end)
    return entries
