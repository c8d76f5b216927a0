"""Serialised grammars kept in a folder, for the next run and for other processes.

One file per grammar: a line of JSON that says what it is for, then the compressed text. Files are
written beside their place and renamed into it, so readers see whole files only; several processes
may use one folder. A file that is not what its name promises is removed, counted, named in the log
of ``graft.grammar``, and the grammar is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import threading
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from graft.cudagraph.errors import OptionError

from .backend import SerializingBackend
from .matcher import CompiledGrammar
from .spec import Spec

__all__ = ["DISK_BYTES", "DiskCache"]

DISK_BYTES = 1 << 30
_FORMAT = 1  # of the file; also to be raised when grammars are stated to a backend in another way
_SUFFIX = ".grammar"
_ABANDONED_S = 3600.0  # a file that somebody began to write so long ago will not be finished
_log = logging.getLogger("graft.grammar")


class DiskCache:
    """A folder of serialised grammars, least recently used out first; any thread may use it.

    Parameters
    ----------
    folder
        Made, for the user alone, if it is not there. Its content is trusted as far as a checksum
        goes: it guards against damage and mistakes, not against who may write there.
    limit_bytes
        Bound of all files together, kept after each write.

    Raises
    ------
    OptionError
        If the folder cannot be made or written to, or the bound is not positive.
    """

    def __init__(self, folder: str | Path, limit_bytes: int = DISK_BYTES):
        if not limit_bytes > 0:
            raise OptionError(f"grammar cache: limit_bytes is {limit_bytes}, must be positive")
        self.folder = Path(folder)
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise OptionError(f"grammar_cache_dir {self.folder}: {error}") from error

    def load(self, backend: SerializingBackend, spec: Spec) -> CompiledGrammar | None:
        """The grammar as it was stored for an equal backend and specification, or None."""
        key = _key(backend, spec)
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            self._count("disk_misses")
            return None
        except OSError as error:
            self._count("disk_ignored")
            _log.warning("grammar cache: %s cannot be read: %s", path, error)
            return None
        try:
            compiled = backend.load(spec, _unpack(data, key))
        except (ValueError, RuntimeError, zlib.error) as error:
            self._count("disk_ignored")
            _log.warning("grammar cache: %s is ignored and rebuilt: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        self._count("disk_hits")
        with contextlib.suppress(OSError):  # another process may have dropped it meanwhile
            os.utime(path)
        return compiled

    def store(self, backend: SerializingBackend, spec: Spec, text: str) -> None:
        """Keep a serialised grammar; where that fails, it is logged and counted only."""
        key = _key(backend, spec)
        data = _pack(text, key)
        if len(data) > self._limit:
            return
        begun = ""
        try:
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix="new-", delete=False) as file:
                begun = file.name
                file.write(data)
            os.replace(begun, self._path(key))
            self._trim()
        except OSError as error:
            self._count("disk_failures")
            _log.warning("grammar cache: %s cannot be written: %s", self._path(key), error)
            with contextlib.suppress(OSError):
                os.unlink(begun)
        else:
            self._count("disk_stores")

    def counters(self) -> dict[str, int]:
        """Hits, misses, stores, and files or writes that came to nothing."""
        names = ("disk_hits", "disk_misses", "disk_ignored", "disk_stores", "disk_failures")
        with self._lock:
            return {name: self._counts[name] for name in names}

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _path(self, key: dict[str, Any]) -> Path:
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.folder / (name[:40] + _SUFFIX)

    def _trim(self) -> None:
        """Remove the files used longest ago; other processes may do the same at once."""
        found = []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat()
                abandoned = status.st_mtime < time.time() - _ABANDONED_S
                if entry.name.endswith(_SUFFIX):
                    found.append((status.st_mtime, status.st_size, entry.path))
                elif entry.name.startswith("new-") and abandoned:
                    os.unlink(entry.path)
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._limit:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size


def _key(backend: SerializingBackend, spec: Spec) -> dict[str, Any]:
    """What a grammar depends on: who compiled it, for which tokens, from what."""
    request = json.dumps(backend.request(spec)).encode()
    return {
        "format": _FORMAT,
        "backend": backend.name,
        "release": backend.release,
        "vocabulary": backend.vocabulary.fingerprint,
        "grammar": hashlib.sha256(request).hexdigest(),
    }


def _pack(text: str, key: dict[str, Any]) -> bytes:
    body = zlib.compress(text.encode(), 1)
    head = {**key, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    return json.dumps(head).encode() + b"\n" + body


def _unpack(data: bytes, key: dict[str, Any]) -> str:
    """The text; ValueError says what is wrong with the file."""
    line, _, body = data.partition(b"\n")
    head = json.loads(line) if len(line) < 4096 else None
    if not isinstance(head, dict):
        raise ValueError("it has no header")
    for name, value in key.items():
        if head.get(name) != value:
            raise ValueError(f"it is for {name} {head.get(name)!r}, not {value!r}")
    if head.get("bytes") != len(body):
        raise ValueError(f"it holds {len(body)} of {head.get('bytes')} bytes")
    if head.get("sha256") != hashlib.sha256(body).hexdigest():
        raise ValueError("its checksum is wrong")
    return zlib.decompress(body).decode()
