"""Kernels: compilation, argument packing and errors before the launch."""

from __future__ import annotations

import ctypes
import io
import os
import struct
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cudagraph_util import PRELUDE, run_program, run_python

from graft.cudagraph import Device, Kernel, KernelError, Stream, StreamLane, load_text
from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.driver.pinned import PinnedSlots
from graft.cudagraph.kernels import progress
from graft.cudagraph.kernels.signature import Parameter, kernel_parameters, waiting_kernels

TEXT = """
extern "C" __global__ void saxpy(float* y, const float* x, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}
extern "C" __global__ void mixed(unsigned char b, unsigned long long big, short s, double d,
                                 int negative, const int* null, double* out) {
  out[0] = b;
  out[1] = (double)(big >> 32);
  out[2] = s;
  out[3] = d;
  out[4] = negative;
  out[5] = null == nullptr;
}
extern "C" __global__ void reverse(int* data, int n) {
  extern __shared__ int tile[];
  tile[threadIdx.x] = data[threadIdx.x];
  __syncthreads();
  data[threadIdx.x] = tile[n - 1 - threadIdx.x];
}
struct S {
  int a;
  double b;
};
extern "C" __global__ void by_value(const S s, int* out) {
  out[0] = s.a;
  out[1] = (int)(s.b * 2.0);
}
extern "C" __global__ void doubled(double d, double* out) { out[0] = d; }
"""


def launch(stream: Stream, kernel: Kernel, grid, block, args, **options) -> None:
    """Launch a kernel and wait."""
    StreamLane(stream).kernel(kernel, grid, block, args, **options)
    stream.synchronize(60)


def test_kernel_computes_saxpy(device: Device, stream: Stream, module) -> None:
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((2, 1000), np.float32)
    dx = device.from_host(x)
    dy = device.from_host(y)
    launch(stream, module["saxpy"], 8, 128, [dy, dx, 0.5, 1000])
    assert np.allclose(dy.to_host(), np.float32(0.5) * x + y, rtol=1e-6)
    assert module["saxpy"].param_sizes == (8, 8, 4, 4)


def test_kernel_receives_scalars_of_all_sizes_and_null(
    device: Device, stream: Stream, module
) -> None:
    out = device.zeros((6,), "float64")
    args = [np.uint8(200), 7 << 32, np.int16(-300), np.float64(0.1), -5, None, out]
    launch(stream, module["mixed"], 1, 1, args)
    assert out.to_host().tolist() == [200, 7, -300, 0.1, -5, 1]


class AsStructure(ctypes.Structure):
    """The structure ``S`` of the kernel source."""

    _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_double))


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: struct.pack("=i4xd", a, b),
        lambda a, b: np.array((a, b), np.dtype([("a", "i4"), ("b", "f8")], align=True))[()],
        AsStructure,
    ],
    ids=["bytes", "numpy", "ctypes"],
)
def test_kernel_receives_struct_by_value(device: Device, stream: Stream, module, make) -> None:
    out = device.zeros((2,), "int32")
    launch(stream, module["by_value"], 1, 1, [make(-7, 20.5), out])
    assert out.to_host().tolist() == [-7, 41]


def test_kernel_converts_python_numbers_to_parameter_type(device: Device, stream, module) -> None:
    y = device.from_host(np.zeros(4, np.float32))
    launch(stream, module["saxpy"], 1, 4, [y, device.from_host(np.ones(4, np.float32)), 3, 4])
    assert y.to_host().tolist() == [3.0] * 4
    out = device.zeros((1,), "float64")
    launch(stream, module["doubled"], 1, 1, [0.1, out])
    assert out.to_host().tolist() == [0.1]


def test_kernel_receives_pinned_arrays_and_fields(device: Device, stream: Stream, module) -> None:
    pinned = device.pinned((4,), "float32")
    slots = PinnedSlots(device, 2, {"x": ("float32", (4,))})
    slots["x"].array[0] = [1, 2, 3, 4]
    pinned.array[:] = 10
    launch(stream, module["saxpy"], 1, 4, [pinned, slots["x"], 2.0, 4])
    assert pinned.array.tolist() == [12, 14, 16, 18]


def test_kernel_uses_dynamic_shared_memory(device: Device, stream: Stream, module) -> None:
    """The launch requests the memory from the driver.

    Without a request, the limit is 48 KiB less the kernel's static shared memory.
    """
    data = device.from_host(np.arange(64, dtype=np.int32))
    kernel = module["reverse"]
    launch(stream, kernel, 1, 64, [data, 64], shared=256)
    assert data.to_host().tolist() == list(range(63, -1, -1))
    limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert call(cu.cuFuncGetAttribute, limit, kernel.function) == 256


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([None, None, 1.0], r"4 arguments \(y, x, a, n\), not 3"),
        ([None, None, 1.0, 1 << 31], "'n' is int32 and cannot hold 2147483648"),
        ([None, None, 1.0, np.uint32(1 << 31)], "'n' is int32 and cannot hold 2147483648"),
        ([None, None, 1.0, 1 << 32], "argument 3"),
        ([None, None, 1.0, -(1 << 31) - 1], "argument 3"),
        ([None, None, 1e40, 1], "argument 2"),
        ([None, 1.0, 1.0, 1], "argument 1"),
        ([None, None, None, 1], "argument 2"),
        ([None, None, np.float64(1), 1], "float64"),
        ([None, None, "1", 1], "argument 2 'a' cannot be a str"),
        ([None, None, 10**400, 1], "argument 2"),
        ([None, None, np.int32(1), 1], "a float of 4 bytes, but int32"),
        ([None, None, 1.0, 1.5], "an int of 4 bytes, but a float was given"),
        ([None, None, 1.0, np.float32(1)], "an int of 4 bytes, but float32"),
        ([None, np.float64(1), 1.0, 1], "a pointer of 8 bytes, but float64"),
        ([None, None, bytes(4), 1], "a float of 4 bytes, but 4 plain bytes"),
        ([bytes(16), None, 1.0, 1], "a pointer of 8 bytes, but 16 plain bytes"),
    ],
)
def test_kernel_pack_rejects_invalid_arguments(module, args, words: str) -> None:
    """Arguments are checked for count, size, range and kind; the error names the argument."""
    with pytest.raises(KernelError, match=words) as caught:
        module["saxpy"].pack(args)
    assert "saxpy" in str(caught.value)


def test_kernel_pack_rejects_negative_unsigned(module) -> None:
    for value in (-1, np.int8(-1)):
        with pytest.raises(KernelError, match="argument 0 'b' is uint8 and cannot hold -1"):
            module["mixed"].pack([value, 0, 0, 0.0, 0, None, None])


@pytest.mark.parametrize("value", [bytes(15), 3, 1.5, np.array((1,), [("a", "i4")])[()], None])
def test_kernel_pack_rejects_values_for_struct(module, value) -> None:
    with pytest.raises(KernelError, match="'by_value': argument 0 's' is of a type that is not"):
        module["by_value"].pack([value, None])


def test_kernel_parameters_are_parsed_from_source() -> None:
    """The parser handles comments, qualifiers, launch bounds and unnamed parameters.

    If two kernels have the same name but different parameters, the types or names are unknown.
    """
    text = """
    // extern "C" __global__ void commented(int a) {}
    #if A
    extern "C" __global__ void __launch_bounds__(32 * (2), 1) twice(float a, unsigned long long) {}
    #else
    extern "C" __global__ void twice(int a, const unsigned b) {}
    #endif
    extern "C" __global__ void none() {}
    extern "C" __global__ void more(const float* const __restrict__ a, /* b */ const volatile
        size_t b, Pair c, uint8_t d, const double e, bool, signed char) {}
    """
    assert kernel_parameters(text) == {
        "twice": (Parameter("a", "other"), Parameter("", "int")),
        "none": (),
        "more": (
            Parameter("a", "pointer", "float32", True),
            Parameter("b", "int", "uint64"),
            Parameter("c", "other"),
            Parameter("d", "int", "uint8"),
            Parameter("e", "float", "float64"),
            Parameter("", "int", "bool"),
            Parameter("", "int", "int8"),
        ),
    }


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("unsigned long long int", "uint64"),
        ("long long", "int64"),
        ("long", "int64"),
        ("short int", "int16"),
        ("signed", "int32"),
        ("unsigned", "uint32"),
        ("char", "int8"),
        ("float*", "float32"),
        ("const volatile float4*", "float32"),
        ("float2*", "complex64"),
        ("uint4*", "uint32"),
        ("longlong2*", "int64"),
        ("double3*", "float64"),
        ("__half2*", "float16"),
        ("__nv_bfloat16*", "bfloat16"),
        ("e4m3_t*", "float8_e4m3fn"),
        ("bool*", "bool"),
        ("int**", "uint64"),
        ("void*", ""),
        ("Slot*", ""),
    ],
)
def test_kernel_parameter_dtypes_are_parsed(text: str, dtype: str) -> None:
    [parameter] = kernel_parameters(f'extern "C" __global__ void f({text} x) {{}}')["f"]
    assert (parameter.name, parameter.dtype) == ("x", dtype)
    assert parameter.is_const == ("const" in text)


@pytest.mark.parametrize(
    ("body", "waits"),
    [
        ("WAIT", True),
        ("if (a) { b(); } WAIT", True),
        ("for (;;) { const Pair p = {1, 2}; } WAIT", True),
        ("const auto f = [&](int i) { if (i) { return 1; } return 2; }; WAIT", True),
        ("if (a) return; WAIT", False),
        ("if (a) { if (b) { return; } } WAIT", False),
        ("if (a) WAIT", False),
        ("if (a) b(); else WAIT", False),
        ("for (;;) { WAIT }", False),
        ("} void other() { WAIT", False),
    ],
)
def test_waiting_kernels_are_parsed_from_source(body: str, waits: bool) -> None:
    """A kernel waits if every thread reaches the call of wait_for_previous_kernel()."""
    body = body.replace("WAIT", "wait_for_previous_kernel();")
    text = f'extern "C" __global__ void kernel(int* data) {{ {body} }}'
    assert waiting_kernels(text) == ({"kernel"} if waits else set())


def test_device_load_caches_by_path_and_defines(
    device: Device, stream: Stream, tmp_path: Path
) -> None:
    source = tmp_path / "value.cu"
    (tmp_path / "local.cuh").write_text("#define OFFSET 100\n")
    source.write_text(
        '#include "graft.cuh"\n#include "local.cuh"\n'
        'extern "C" __global__ void value(int* out) { out[0] = VALUE + OFFSET + sizeof(bf16_t); }\n'
    )
    first = device.load(source, {"VALUE": 1})
    second = device.load(source, {"VALUE": 2})
    assert device.load(source, {"VALUE": 1}) is first and first is not second
    out = device.zeros((1,), "int32")
    for loaded, expected in ((first, 103), (second, 104)):
        launch(stream, loaded["value"], 1, 1, [out])
        assert out.to_host().tolist() == [expected]


def test_device_load_of_loaded_file_does_not_access_disk(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """load() must be fast, because models call it for every kernel launch."""
    source = tmp_path / "found.cu"
    source.write_text('extern "C" __global__ void found(int* out) { out[0] = 1; }\n')
    first = device.load(source)
    monkeypatch.setattr(Path, "resolve", lambda *_: pytest.fail("a path was resolved"))
    assert device.load(source) is first and device.load(str(source)) is first


def test_kernel_cache_notices_changed_header(
    device: Device, stream: Stream, tmp_path: Path
) -> None:
    out = device.zeros((1,), "int32")
    text = '#include "n.cuh"\nextern "C" __global__ void n(int* out) { out[0] = N; }\n'
    for n in (5, 6):
        (tmp_path / "n.cuh").write_text(f"#define N {n}\n")
        kernel = load_text(device, text, "n.cu", folder=tmp_path)["n"]
        launch(stream, kernel, 1, 1, [out])
        assert out.to_host().tolist() == [n]


def test_relative_include_folder_follows_working_directory(
    device: Device, stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = device.zeros((1,), "int32")
    text = '#include "n.cuh"\nextern "C" __global__ void n(int* out) { out[0] = N; }\n'
    for n in (7, 8):
        (tmp_path / str(n) / "headers").mkdir(parents=True)
        (tmp_path / str(n) / "headers" / "n.cuh").write_text(f"#define N {n}\n")
        monkeypatch.chdir(tmp_path / str(n))
        kernel = load_text(device, text, "n.cu", folder="headers")["n"]
        launch(stream, kernel, 1, 1, [out])
        assert out.to_host().tolist() == [n]


CACHED = """
text = 'extern "C" __global__ void one(int* out) { *out = 1; }'
kernel = load_text(device, text, "one.cu")["one"]
out = device.zeros((1,), "int32")
StreamLane(stream).kernel(kernel, 1, 1, [out])
stream.synchronize(60)
print(out.to_host()[0])
"""


def run_cached(folder: Path) -> str:
    """Run a kernel in a process with the cache ``folder``; return its standard error."""
    done = run_program(CACHED, GRAFT_DEVICE="soft", GRAFT_CACHE=str(folder))
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "damage",
    [
        "changed",
        "unreadable",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("truncated", "empty")),
    ],
)
@pytest.mark.full("unreadable")
def test_kernel_cache_rebuilds_corrupt_images(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "kernels"
    assert run_cached(folder) == "" and folder.stat().st_mode & 0o777 == 0o700
    (kept,) = folder.rglob("*.so")
    whole = kept.read_bytes()
    if damage == "unreadable":
        kept.unlink()
        kept.symlink_to(tmp_path / "nowhere")
    else:
        changed = whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:]
        kept.write_bytes({"truncated": whole[:3000], "empty": b"", "changed": changed}[damage])
    assert run_cached(folder) == ""
    assert [p for p in folder.rglob("*") if p.is_file()] == [kept] and kept.read_bytes() == whole


@pytest.mark.parametrize("why", ["is a file", "others may write", "of another user"])
def test_kernel_cache_replaces_unusable_folder_with_warning(tmp_path: Path, why: str) -> None:
    """An unusable cache folder is left unchanged. A private one is used, with a warning."""
    folder = tmp_path / "kernels"
    if why == "is a file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777 if why == "others may write" else 0o700)
    if why == "of another user":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(folder, 12345, -1)
    stderr = run_cached(folder)
    assert stderr.count(f"compiled kernels are not cached, because {folder} cannot be used") == 1
    assert not folder.is_dir() or not list(folder.iterdir())


WRITING = """
import os, resource
from pathlib import Path
from graft.native.softcuda import compile
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
for name in ("a", "b"):
    compile._write_cached(Path(os.environ["GRAFT_CACHE"]) / name, b"x" * 100)
"""


def test_kernel_cache_warns_about_failed_writes_once(tmp_path: Path) -> None:
    """A warning about a full disk is printed once, not for every kernel, without a source line."""
    done = run_python(PRELUDE + WRITING, GRAFT_DEVICE="soft", GRAFT_CACHE=str(tmp_path))
    assert done.returncode == 0
    words = f"compiled kernels cannot be written to the cache {tmp_path}: File too large"
    assert done.stderr == f"graft:1: UserWarning: {words}\n"
    assert list(tmp_path.iterdir()) == []


class Terminal(io.StringIO):
    """A text stream that counts as a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("is_terminal", "requested", "delay_s", "shown"),
    [
        (True, None, 0.0, True),
        (True, None, 60.0, False),
        (True, False, 0.0, False),
        (False, None, 0.0, False),
        (False, True, 0.0, True),
    ],
)
def test_compile_progress_is_shown_after_delay(
    device: Device, monkeypatch, is_terminal: bool, requested, delay_s: float, shown: bool
) -> None:
    """The name of a slow source is shown on a terminal, or if the program asks for it."""
    stderr = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress, "DELAY_S", delay_s)
    monkeypatch.setattr(progress, "_requested", requested)
    monkeypatch.setattr(progress, "_spent_s", 0.0)
    name = f"slow_{is_terminal}_{requested}_{delay_s:.0f}.cu"
    source = f'extern "C" __global__ void one(int* x) {{ x[0] = 1; }}  // {time.time_ns()}'
    load_text(device, source, name)
    text = stderr.getvalue()
    assert (f"compiling kernels: {name}" in text) == shown
    if shown:
        assert text.rstrip(" ").endswith("\r")  # the line is cleared
