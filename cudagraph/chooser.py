"""Which libcuda.so.1 this process uses: NVIDIA's driver or the soft device.

The first library loaded under a SONAME answers for it in the whole process. So the real driver is
probed in a child process only, and the soft device is loaded before anything looks for the driver.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import json
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
#: The first cuInit of a machine can take many seconds.
PROBE_LIMIT_S = 30.0
#: Packages that talk to NVIDIA's driver on their own and cannot run on the soft device.
GUARDED = ("cupy", "torch.cuda")

#: Asks NVIDIA's driver; a driver that was once loaded in this process would answer for the soft
#: device too.
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


def ask_child(
    *command: str, limit_s: float, environment: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """Run Python in a child process; returns what it printed, or "" and why nothing."""
    try:
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=limit_s,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {limit_s:g} s"
    except OSError as error:
        return "", f"the probe could not run: {error}"
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or ["the probe died"])[-1]
    return done.stdout.strip(), ""


def probe_cuda() -> tuple[dict[str, Any], str]:
    """Ask NVIDIA's driver in a child process.

    Returns
    -------
    (dict, str)
        Its ``version`` and the names of its ``devices``, where it was found; and "" when a device
        answers, else why not.
    """
    said, why = ask_child("-I", "-S", "-c", PROBE, limit_s=PROBE_LIMIT_S)
    if why:
        return {}, why
    found = json.loads(said)
    if found["status"]:
        return found, f"cuInit answered {found['status']}"
    return found, "" if found["devices"] else "the driver has no device"


def choose(kind: str) -> tuple[str, str]:
    """Turn "auto", "cuda" or "soft" into "cuda" or "soft", and say why "auto" did not take CUDA.

    OptionError for anything else.
    """
    if kind not in KINDS:
        raise OptionError(f"device kind {kind!r} is not one of {', '.join(KINDS)} (GRAFT_DEVICE)")
    if kind != "auto":
        return kind, ""
    why = probe_cuda()[1]
    return "soft" if why else "cuda", why


def preload_soft() -> Path:
    """Load the soft device as this process's driver and guard the imports that cannot use it.

    Raises
    ------
    DeviceError
        The library is missing, or another libcuda.so.1 is loaded already.
    """
    path = soft_library()
    if not path.is_file():
        raise DeviceError(f"the soft device is not built: {path} does not exist (make native)")
    _refuse_other(path)
    try:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise DeviceError(f"the soft device cannot be loaded: {error}") from error
    _refuse_other(path)
    if not any(isinstance(finder, _ImportGuard) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportGuard())
    return path


def _refuse_other(path: Path) -> None:
    loaded = _native.loaded_library(SONAME)
    if loaded and Path(loaded).resolve() != path.resolve():
        raise DeviceError(
            f"the soft device was asked for, but {loaded} already answers for {SONAME} in this "
            "process: open the soft device before importing anything that loads the driver "
            "(cupy, torch with CUDA, cuda.core), or choose GRAFT_DEVICE=cuda"
        )


class _ImportGuard(importlib.abc.MetaPathFinder):
    """Refuses imports that would run into the soft device in odd ways."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in GUARDED:
            raise SoftImportError(
                f"{fullname} needs NVIDIA's driver, and this process runs on graft's soft device: "
                "use GRAFT_DEVICE=cuda, or another process"
            )
        return None
