"""Cache of machine code for NVIDIA GPUs, which NVRTC and nvdisasm generate for the tests.

Compilation takes most of the time of the tests that read machine code. The results are stored in
graft's cache folder. A key covers all that a result depends on: the source text with its includes,
the options, and the files of NVRTC and nvdisasm.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graft.cudagraph.kernels.compiler import cache_folder, include_folders, nvrtc_options
from graft.cudagraph.kernels.ptx import nvrtc_library
from graft.native.softcuda.compile import included_files
from graft.tools.bench import kernel_report
from graft.tools.bench.kernel_report import Variant

compile_without_cache = kernel_report.compile_cubin
disassemble_without_cache = kernel_report.disassemble


def compile_cubin(
    variant: Variant, arch: int, more_options: Sequence[str] = ()
) -> tuple[bytes, str]:
    """Return the result of `kernel_report.compile_cubin`, from the cache if possible."""
    text = variant.path.read_text()
    headers = included_files(text, include_folders(variant.path.parent))
    options = [*nvrtc_options(variant.path, dict(variant.defines)), str(arch), *more_options]
    key = [text, *map(str, sorted(headers.items())), *options, compiler_identity()]

    def compile_now() -> list[str]:
        cubin, log = compile_without_cache(variant, arch, more_options)
        return [base64.b64encode(cubin).decode(), log]

    encoded, log = stored(key, compile_now)
    return base64.b64decode(encoded), log


def disassemble(cubin: bytes) -> str:
    """Return the result of `kernel_report.disassemble`, from the cache if possible."""
    program = kernel_report._find_nvdisasm()
    key = [hashlib.sha256(cubin).hexdigest(), file_identity(Path(program))]
    return stored(key, lambda: disassemble_without_cache(cubin))


@functools.cache
def compiler_identity() -> str:
    """Return a text that identifies NVRTC and the options that `kernel_report` adds."""
    return file_identity(nvrtc_library()) + Path(kernel_report.__file__).read_text()


def file_identity(path: Path) -> str:
    """Return path, size and modification time of a file."""
    status = path.stat()
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def stored(key: Sequence[str], make: Callable[[], Any]) -> Any:
    """Return the stored result of a key. If there is none, call `make` and store its result."""
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    path = Path(cache_folder(), "machine_code", digest)
    with contextlib.suppress(FileNotFoundError):
        return json.loads(zlib.decompress(path.read_bytes()))
    result = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(zlib.compress(json.dumps(result).encode(), 1))
    os.replace(file.name, path)
    return result
