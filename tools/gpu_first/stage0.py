"""First look at a machine, with the standard library alone.

    python tools/gpu_first/stage0.py versions|nvidia-smi|driver|kernels

The checks run although graft is not built and CuPy is not installed: versions, nvidia-smi, the
driver with its functions and attributes, and NVRTC with all kernels. The exit status is not 0 if a
check failed. The caller runs each check in a process of its own, because a driver may hang.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Time limit of a check. The first cuInit after a boot can take many seconds.
LIMIT_S = 30
#: Packages of graft that contain kernels.
KERNEL_PACKAGES = ("cudagraph", "sampling", "grammar", "models", "tools")
#: Packages whose versions are reported.
PACKAGES = (
    *("numpy", "cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "cuda-pathfinder"),
    *("nvidia-cuda-nvrtc", "nanobind", "scikit-build-core", "cmake", "ninja", "pytest"),
    *("pytest-xdist", "tokenizers", "safetensors", "jinja2", "tqdm", "llguidance", "xgrammar"),
    *("apache-tvm-ffi", "jsonschema"),
)
TOOLS = ("nvidia-smi", "nvcc", "g++", "cmake", "ninja", "make", "compute-sanitizer", "ncu", "nsys")
#: Attributes of the device that graft depends on, by their number (CUdevice_attribute).
ATTRIBUTES = {
    1: "max threads per block",
    8: "shared memory per block",
    10: "warp size",
    13: "clock rate in kHz",
    16: "multiprocessors",
    17: "kernel execution timeout",
    20: "compute mode",
    31: "concurrent kernels",
    36: "memory clock rate in kHz",
    37: "memory bus width",
    38: "L2 cache bytes",
    40: "asynchronous engines",
    41: "unified addressing",
    75: "compute capability, major",
    76: "compute capability, minor",
    78: "stream priorities",
    83: "managed memory",
    88: "pageable memory access",
    91: "host registered memory at the same address",
    92: "memory operations of streams (v1)",
    93: "64-bit memory operations of streams",
    94: "wait for a value NOR",
    97: "shared memory per block, with opt-in",
    106: "blocks per multiprocessor",
    116: "GPUDirect RDMA",
    127: "memory operations of streams",
}


def check_versions() -> None:
    """Print the versions of the system, packages and tools, and the environment variables."""
    print(f"python {platform.python_version()} ({sys.executable}), {platform.platform()}")
    print(f"{len(os.sched_getaffinity(0))} cores, {' '.join(platform.libc_ver())}")
    for name in PACKAGES:
        try:
            print(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            print(name, "is not installed")
    for name in TOOLS:
        print(name, shutil.which(name))
    for name, value in sorted(os.environ.items()):
        if re.match("CUDA|CUPY|NVIDIA|GRAFT|SOFTCUDA|LD_|PYTHONPATH", name):
            print(f"{name}={value}")


def check_smi() -> None:
    """Print the report of nvidia-smi."""
    subprocess.run(["nvidia-smi", "-q"], check=True)


def load_driver() -> ctypes.CDLL:
    """Load the driver, or the soft device if GRAFT_DEVICE=soft."""
    if os.environ.get("GRAFT_DEVICE") != "soft":
        return ctypes.CDLL("libcuda.so.1")
    spec = importlib.util.find_spec("graft.native")
    assert spec is not None and spec.submodule_search_locations, "graft is not built"
    folder = next(iter(spec.submodule_search_locations))
    return ctypes.CDLL(str(Path(folder, "soft", "libcuda.so.1")))


def check_driver() -> None:
    """Print the driver's version, devices and attributes, and check the functions of driver.h."""
    cuda = load_driver()
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    print("driver version", number.value)
    check_symbols(cuda)
    start = time.monotonic()
    status = cuda.cuInit(0)
    print(f"cuInit returned {status} after {time.monotonic() - start:.2f} s")
    if status:
        sys.exit(1)
    cuda.cuDeviceGetCount(ctypes.byref(number))
    for device in range(number.value):
        name = ctypes.create_string_buffer(256)
        cuda.cuDeviceGetName(name, 256, device)
        print(f"device {device}: {name.value.decode()}")
        for attribute, title in ATTRIBUTES.items():
            value = ctypes.c_int()
            failed = cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            print(f"  {title}: {f'error {failed}' if failed else value.value}")


def check_symbols(cuda: ctypes.CDLL) -> None:
    """Look up each driver function that graft's native code calls, and print the missing ones."""
    text = (ROOT / "native" / "hostwork" / "driver.h").read_text()
    calls = re.findall(r"CALL\(\s*(?:\\\s*)?\w+,\s*(cu\w+),\s*(\d+)", text)
    missing = []
    for name, version in calls:
        address = ctypes.c_void_p()
        found = ctypes.c_int()
        status = cuda.cuGetProcAddress_v2(
            name.encode(),
            ctypes.byref(address),
            int(version),
            ctypes.c_uint64(0),
            ctypes.byref(found),
        )
        if status or not address:
            missing.append(f"{name} {version} (status {status})")
    print(f"{len(calls) - len(missing)} of {len(calls)} driver functions found")
    if missing or not calls:
        sys.exit(f"missing driver functions: {', '.join(missing)}")


# NVRTC --------------------------------------------------------------------------------------------


def load_nvrtc() -> ctypes.CDLL:
    """Load NVRTC from the Python packages of NVIDIA, or from the system."""
    paths = [
        path
        for folder in sys.path
        for path in sorted(Path(folder or ".").glob("nvidia/*/lib/libnvrtc.so.*"))
        if "builtins" not in path.name and "alt" not in path.name
    ]
    for name in (*map(str, paths), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        print(f"NVRTC {major.value}.{minor.value}: {name}")
        return library
    sys.exit("NVRTC is not installed (pip install nvidia-cuda-nvrtc)")


def architecture() -> str:
    """Return the architecture of the first device, such as "sm_90", or "sm_90" without a GPU."""
    try:
        cuda = load_driver()
    except OSError:
        return "sm_90"
    major, minor = ctypes.c_int(), ctypes.c_int()
    cuda.cuInit(0)
    failed = cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, 0)
    failed += cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, 0)
    is_soft = os.environ.get("GRAFT_DEVICE") == "soft"
    return "sm_90" if failed or is_soft else f"sm_{major.value}{minor.value}"


def compile_kernel(nvrtc: ctypes.CDLL, path: Path, arch: str) -> str:
    """Compile a kernel file with the default values of its macros. Return the log of a failure."""
    options = ["--std=c++17", "--fmad=false", "--device-as-default-execution-space", "-ftz=true"]
    options += [f"-arch={arch}", f"-I{ROOT}", f"-I{ROOT / 'cudagraph' / 'kernels'}"]
    options.append(f"-I{path.parent}")
    program = ctypes.c_void_p()
    text, name = path.read_bytes(), path.name.encode()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None)
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    log = b""
    if status:
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, buffer)
        log = buffer.value or b"status %d" % status
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return log.decode(errors="replace")


def kernel_files(packages: Sequence[str]) -> list[Path]:
    """Return the kernel files of packages of graft, except those of the soft device."""
    paths = [path for name in packages for path in sorted((ROOT / name).rglob("kernels/*.cu"))]
    return [path for path in paths if not path.stem.endswith("_thread")]


def check_kernels(*packages: str) -> None:
    """Compile kernel files with NVRTC for the GPU, and print the log of each failure.

    Without an argument, the kernel files of all packages are compiled.
    """
    nvrtc = load_nvrtc()
    arch = architecture()
    paths = kernel_files(packages or KERNEL_PACKAGES)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        logs = list(pool.map(lambda path: compile_kernel(nvrtc, path, arch), paths))
    failed = 0
    for path, log in zip(paths, logs, strict=True):
        if log:
            failed += 1
            print(f"{path.relative_to(ROOT)} does not compile:\n{log}")
    print(f"{len(paths) - failed} of {len(paths)} kernel files compile for {arch}")
    if failed or not paths:
        sys.exit(1)


CHECKS: dict[str, Callable[..., None]] = {
    "versions": check_versions,
    "nvidia-smi": check_smi,
    "driver": check_driver,
    "kernels": check_kernels,
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]](*sys.argv[2:])
