"""Tests of the library that returns PTX where programs ask NVRTC for cubins."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from graft.cudagraph.kernels.nvrtc import missing_compiler

pytestmark = [
    pytest.mark.ptx,
    pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler() or "unused"),
]

#: Compiles a kernel for sm_90 to a cubin, loads it, launches it and prints what happened.
BINDINGS_PROGRAM = """
import ctypes, json
import numpy as np
from cuda.bindings import driver as cu, nvrtc

def call(function, *arguments):
    status, *values = function(*arguments)
    assert not int(status), status
    return values[0] if values else None

def create(text):
    return call(nvrtc.nvrtcCreateProgram, text, b"k.cu", 0, [], [])

SOURCE = b'''extern "C" __global__ void scale(float* x, float by, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= by;
}'''
program = create(SOURCE)
call(nvrtc.nvrtcCompileProgram, program, 1, [b"--gpu-architecture=sm_90"])
image = bytearray(call(nvrtc.nvrtcGetCUBINSize, program))
call(nvrtc.nvrtcGetCUBIN, program, image)
ptx = bytearray(call(nvrtc.nvrtcGetPTXSize, program))
call(nvrtc.nvrtcGetPTX, program, ptx)
wrong = create(b"__global__ void f() { absent(); }")
(status,) = nvrtc.nvrtcCompileProgram(wrong, 1, [b"-arch=sm_90"])
log = bytearray(call(nvrtc.nvrtcGetProgramLogSize, wrong))
call(nvrtc.nvrtcGetProgramLog, wrong, log)
(option,) = nvrtc.nvrtcCompileProgram(create(SOURCE), 1, [b"-arch=sm_1"])

call(cu.cuInit, 0)
call(cu.cuCtxSetCurrent, call(cu.cuDevicePrimaryCtxRetain, 0))
status_of_load, module = cu.cuModuleLoadData(bytes(image))
correct = None
if int(status_of_load) == 0:
    scale = call(cu.cuModuleGetFunction, module, b"scale")
    x = np.arange(300, dtype=np.float32)
    memory = call(cu.cuMemAlloc, x.nbytes)
    call(cu.cuMemcpyHtoD, memory, x.ctypes.data, x.nbytes)
    values = (int(memory), 2.5, 300), (ctypes.c_void_p, ctypes.c_float, ctypes.c_int)
    call(cu.cuLaunchKernel, scale, 3, 1, 1, 128, 1, 1, 0, 0, values, 0)
    y = np.empty_like(x)
    call(cu.cuMemcpyDtoH, y.ctypes.data, memory, x.nbytes)
    correct = bool((y == x * np.float32(2.5)).all())
print(json.dumps({
    "image": bytes(image[:4]).hex(), "is_ptx": image == ptx, "load": int(status_of_load),
    "correct": correct, "errors": [int(status), int(option)], "log": log.decode(),
    "message": call(nvrtc.nvrtcGetErrorString, status).decode(),
}))
"""

#: Compiles a template to a cubin with cuda.core, launches it and compares the result.
CORE_PROGRAM = """
import numpy as np
from cuda.core import (
    Device, LaunchConfig, LegacyPinnedMemoryResource, Program, ProgramOptions, launch,
)
device = Device()
device.set_current()
stream = device.create_stream()
source = "template <typename T> __global__ void scale(T* x, T by) { x[threadIdx.x] *= by; }"
program = Program(source, "c++", ProgramOptions(arch=f"sm_{device.arch}"))
code = program.compile("cubin", name_expressions=("scale<float>",))
buffer = LegacyPinnedMemoryResource().allocate(256)
x = np.from_dlpack(buffer).view(np.float32)
x[:] = np.arange(64)
kernel = code.get_kernel("scale<float>")
launch(stream, LaunchConfig(grid=1, block=64), kernel, buffer, np.float32(3))
stream.sync()
np.testing.assert_array_equal(x, np.arange(64) * 3)
print("passed")
"""


def run_soft(tmp_path, program: str, *options: str) -> subprocess.CompletedProcess:
    """Run a program with ``graft soft`` and the given options."""
    path = tmp_path / "program.py"
    path.write_text(program)
    environment = {name: value for name, value in os.environ.items() if name != "GRAFT_CODE"}
    command = [sys.executable, "-m", "graft.tools.cli", "soft", *options, "--", str(path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"SOFTCUDA_LOG": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Output of the program with ``--code host`` and ``--code ptx``, and its log with the first."""
    host = run_soft(tmp_path_factory.mktemp("host"), BINDINGS_PROGRAM, "--code", "host")
    ptx = run_soft(tmp_path_factory.mktemp("ptx"), BINDINGS_PROGRAM, "--code", "ptx")
    return json.loads(host.stdout), json.loads(ptx.stdout), host.stderr


def test_nvrtc_wrapper_returns_ptx_as_cubin(results):
    """The bytes and size of the cubin are those of the PTX, and the loaded kernel is correct."""
    ptx = results[1]
    assert ptx["is_ptx"] and bytes.fromhex(ptx["image"]).startswith(b"//")
    assert ptx["load"] == 0 and ptx["correct"] is True


def test_nvrtc_wrapper_keeps_compilation_errors(results):
    """The error codes, their texts and the log equal those of NVRTC."""
    host, ptx, _ = results
    for key in ("errors", "log", "message"):
        assert ptx[key] == host[key]
    assert host["errors"] == [6, 5] and '"absent" is undefined' in ptx["log"]


def test_soft_device_without_ptx_refuses_cubin(results):
    """With ``--code host``, NVRTC returns an ELF file, and the error says what to do."""
    host, _, log = results
    assert bytes.fromhex(host["image"]) == b"\x7fELF" and not host["is_ptx"]
    assert host["load"] == 209 and "graft soft --code ptx" in log


@pytest.mark.skipif(importlib.util.find_spec("cuda.core") is None, reason="cuda.core is missing")
@pytest.mark.parametrize("options", [(), ("--code", "ptx")])
def test_nvrtc_wrapper_serves_cuda_core(tmp_path, options):
    """If cuda.core is installed, its programs need no option."""
    assert run_soft(tmp_path, CORE_PROGRAM, *options).stdout == "passed\n"


def test_check_of_a_gpu_passes_on_the_cuda_path_without_cupy(tmp_path):
    """Kernels are compiled for CUDA, with NVRTC in place of CuPy, as on a GPU machine."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['cupy'] = None\n")
    variables = {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "GRAFT_CACHE": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-m", "graft.tools.cli", "soft", "--code", "ptx", "--", "env"]
    command += ["-u", "GRAFT_CODE", "GRAFT_DEVICE=cuda", sys.executable]
    command += ["-m", "graft.tools.gpu_first", "--small", "--out", str(tmp_path / "out")]
    command += ["--sections", "doctor", "features", "truth"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "NVRTC without CuPy works; CuPy is not installed" in done.stdout
    assert "cuda:0 graft soft device" in done.stdout
    assert done.stdout.endswith("0 failures\n")


#: Loads nvJitLink as cuda.core does, and as a library that was linked with it.
NVJITLINK_PROGRAM = """
import ctypes, os
library = ctypes.CDLL("libnvJitLink.so.13", mode=os.RTLD_NOLOAD)
versioned = getattr(library, "__nvJitLinkCreate_13_4")
print(hasattr(library, "nvJitLinkVersion"), hasattr(library, "nvJitLinkCreate"), versioned())
"""


def test_nvjitlink_is_hidden():
    """Libraries that were linked with nvJitLink can be loaded, but cuda.core does not find it."""
    command = [sys.executable, "-m", "graft.tools.cli", "soft", "--code", "ptx"]
    done = subprocess.run(
        [*command, "--", "-c", NVJITLINK_PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.stdout == "False False 6\n", done.stderr
