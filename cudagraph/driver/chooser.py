"""Selection of ``libcuda.so.1`` for this process: NVIDIA's driver or the soft device.

The soft device is a CPU implementation of the part of the CUDA driver API that graft uses. A
process uses only one library per SONAME, namely the first one that it loads. NVIDIA's driver is
therefore probed only in a child process, and the soft device is loaded before other code can load
NVIDIA's driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from graft.cudagraph.errors import DeviceError, OptionError, SoftImportError
from graft.native import _native

KINDS = ("auto", "cuda", "soft")
SONAME = "libcuda.so.1"
#: Time limit of the probe. The first cuInit after boot can take many seconds.
PROBE_LIMIT_S = 30.0
#: Packages that call NVIDIA's driver directly and cannot run on the soft device. torch is not one
#: of them: its tensors in host memory can be used, and ``torch.cuda.is_available()`` is false.
GUARDED = ("cupy",)

#: Program of the probe. It runs in a child process, because loading NVIDIA's driver in this process
#: would prevent loading the soft device later.
PROBE = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
status, version, count = cuda.cuInit(0), ctypes.c_int(), ctypes.c_int()
cuda.cuDriverGetVersion(ctypes.byref(version))
names = []
if status == 0:
    cuda.cuDeviceGetCount(ctypes.byref(count))
for i in range(count.value):
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGetName(name, 256, i)
    names.append(name.value.decode())
print(json.dumps({"status": status, "version": version.value, "devices": names}))
"""


def soft_library() -> Path:
    """Return the path of the soft device's library."""
    return Path(_native.__file__).absolute().parent / "soft" / SONAME


def run_python_child(
    *command: str, limit_s: float, environment: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """Run Python with the arguments `command` in a child process, for at most `limit_s` seconds.

    `environment` is the environment of the child; default: that of this process. If the child
    exceeds the limit, its own child processes, such as a compiler, are killed as well.

    Return the child's standard output and the reason for its failure. The reason is "" if the child
    succeeded; the output is "" if it failed.
    """
    try:
        child = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        return "", f"the probe process could not be started: {error}"
    with child:
        try:
            output, errors = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return "", f"no answer within {limit_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    if child.returncode:
        error_lines = errors.strip().splitlines() or ["the probe process crashed"]
        return "", error_lines[-1]
    return output.strip(), ""


def probe_cuda() -> tuple[dict[str, Any], str]:
    """Query NVIDIA's driver in a child process.

    Return properties of the driver, and the reason why no device is available ("" if a device is
    available). The properties are ``status`` (the result of cuInit), ``version`` and ``devices``
    (the names of the devices). They are {} if no driver was found.
    """
    output, reason = run_python_child("-I", "-S", "-c", PROBE, limit_s=PROBE_LIMIT_S)
    if reason:
        return {}, reason
    found = json.loads(output)
    if found["status"]:
        reason = f"cuInit returned {found['status']}"
    elif not found["devices"]:
        reason = "the driver has no device"
    return found, reason


def choose(kind: str) -> tuple[str, str]:
    """Return the driver ("cuda" or "soft") for a device kind ("auto", "cuda" or "soft").

    Also return the reason why "auto" selected the soft device ("" in all other cases).
    """
    if kind not in KINDS:
        raise OptionError(f"device kind {kind!r} is not one of {', '.join(KINDS)} (GRAFT_DEVICE)")
    if kind != "auto":
        return kind, ""
    _, reason = probe_cuda()
    return ("soft" if reason else "cuda"), reason


def preload_soft() -> Path:
    """Load the soft device as this process's driver, and return the path of its library.

    Afterwards, importing a package in `GUARDED` raises an error. DeviceError is raised if the
    library does not exist or another libcuda.so.1 is already loaded.
    """
    path = soft_library()
    if not path.is_file():
        raise DeviceError(f"the soft device is not built: {path} does not exist (make setup)")
    _check_no_other_driver(path)
    try:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise DeviceError(f"the soft device cannot be loaded: {error}") from error
    _check_no_other_driver(path)
    if not any(isinstance(finder, _ImportGuard) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportGuard())
    return path


def _check_no_other_driver(path: Path) -> None:
    loaded = _native.loaded_library(SONAME)
    if loaded and Path(loaded).resolve() != path.resolve():
        raise DeviceError(
            f"the soft device was requested, but {loaded} is already loaded as {SONAME} in this "
            "process: open the soft device before importing anything that loads the driver "
            "(cupy, torch with CUDA, cuda.core), or select GRAFT_DEVICE=cuda"
        )


class _ImportGuard(importlib.abc.MetaPathFinder):
    """Raise a clear error for imports of packages that cannot run on the soft device."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in GUARDED:
            raise SoftImportError(
                f"{fullname} needs NVIDIA's driver, and this process runs on graft's soft device: "
                "use GRAFT_DEVICE=cuda, or another process"
            )
        return None
