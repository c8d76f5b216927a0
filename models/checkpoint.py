"""Reading safetensors checkpoints, one file or sharded, without copying until asked.

The format (safetensors): an 8-byte little-endian header length, a JSON header of
``name -> {dtype, shape, data_offsets}``, then the tensors' bytes. NumPy has no bfloat16, so the
bits are handed out as stored; every length and offset is checked before a byte is used.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graft.cudagraph.dtypes import E4M3
from graft.models.errors import CheckpointError, ConfigError
from graft.models.fields import read_json

FLOATS = ("float32", "float16", "bfloat16")
_HEADER_LIMIT = 100_000_000
# safetensors' dtype -> (graft's name, NumPy storage, bytes). None: known, but not readable here.
_DTYPES: dict[str, tuple[str, str, int]] = {
    "F32": ("float32", "<f4", 4),
    "F16": ("float16", "<f2", 2),
    "BF16": ("bfloat16", "<u2", 2),
    "F8_E4M3": (E4M3, "u1", 1),
    "I64": ("int64", "<i8", 8),
    "I32": ("int32", "<i4", 4),
    "U64": ("uint64", "<u8", 8),
    "U32": ("uint32", "<u4", 4),
    "U8": ("uint8", "u1", 1),
    "BOOL": ("uint8", "u1", 1),
}


@dataclass(frozen=True)
class _Entry:
    """Where one tensor lies."""

    file: Path
    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """Tensors of a model folder (or of one ``.safetensors`` file), by name.

    Parameters
    ----------
    path : a folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and the
        shards it lists; or one safetensors file.

    Raises
    ------
    CheckpointError
        Files missing, truncated or inconsistent. Opening reads and checks every header, so a
        damaged checkpoint is refused before any tensor is read.
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
        if single.is_file():
            self._entries = _read_header(single)
        elif index.is_file():
            self._entries = _read_shards(index)
        elif any(self.path.glob("*.bin")):
            raise CheckpointError(
                f"{self.path}: only pickled weights (.bin) found, which graft does not read; "
                "convert them once with safetensors.torch.save_file(torch.load(file, "
                "weights_only=True), 'model.safetensors')"
            )
        else:
            raise CheckpointError(
                f"{self.path}: no model.safetensors and no model.safetensors.index.json"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(self._entries))

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def get(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        dtypes: tuple[str, ...] = FLOATS,
    ) -> tuple[np.ndarray, str]:
        """One tensor, as stored.

        Parameters
        ----------
        name : its name in the checkpoint.
        shape : the shape it must have.
        dtypes : the dtypes it may have.

        Returns
        -------
        array : np.ndarray
            Read-only view of the mapped file; bfloat16 and E4M3 as their bits, booleans as uint8.
        dtype : str
            Name of its dtype.
        """
        entry = self._entry(name)
        if entry.kind not in _DTYPES:
            raise CheckpointError(
                f"{entry.file}: {name} has dtype {entry.kind}, which graft does not read"
            )
        dtype, storage, _ = _DTYPES[entry.kind]
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
        if file not in self._maps:
            try:
                self._maps[file] = np.memmap(file, dtype=np.uint8, mode="r")
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{file}: cannot be mapped ({error})") from error
        return self._maps[file]


def _read_shards(index: Path) -> dict[str, _Entry]:
    try:
        weight_map = read_json(index)["weight_map"]
        pairs = [(str(name), str(file)) for name, file in weight_map.items()]
    except ConfigError as error:
        raise CheckpointError(f"{error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: is not a shard index ({error!r})") from error
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
    """Parse and check one file's header: every tensor lies inside the file, none overlap."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > _HEADER_LIMIT or 8 + length > size:
                raise CheckpointError(f"{file}: truncated, or not a safetensors file")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: header is not an object")
    header.pop("__metadata__", None)
    entries = {name: _read_entry(file, name, spec, 8 + length) for name, spec in header.items()}
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise CheckpointError(f"{file}: {name} does not follow the tensor before it")
        end = entry.end
    if end != size:
        raise CheckpointError(
            f"{file}: tensors end at byte {end}, the file at {size}; it is truncated or damaged"
        )
    return entries


def _read_entry(file: Path, name: str, spec: Any, base: int) -> _Entry:
    try:
        kind, shape, (begin, end) = spec["dtype"], tuple(spec["shape"]), spec["data_offsets"]
        numbers = (*shape, begin, end)
        whole = all(type(x) is int and 0 <= x < 1 << 63 for x in numbers)
        if not whole or begin > end or type(kind) is not str:
            raise ValueError(f"dtype {kind!r:.20}, shape {shape!s:.80}, offsets {begin}..{end}")
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file}: header entry of {name} is malformed ({error})") from error
    if kind in _DTYPES and math.prod(shape) * _DTYPES[kind][2] != end - begin:
        raise CheckpointError(
            f"{file}: {name} of shape {list(shape)} and dtype {kind} does not fill its "
            f"{end - begin} bytes"
        )
    return _Entry(file, str(kind), shape, base + begin, base + end)
