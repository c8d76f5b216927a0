"""Tests of the compilation for CUDA: with CuPy, and with NVRTC where CuPy does not work.

The modules `cupy` and `cuda.bindings.nvrtc` are replaced, so the tests need no GPU.
"""

from __future__ import annotations

import contextlib
import sys
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from graft.cudagraph.errors import DeviceError, KernelError
from graft.cudagraph.kernels import compiler, nvrtc

SOURCE = compiler.KernelSource(compiler.TEST_KERNEL, "one_line.cu", {}, None)
ATTRIBUTES = {"COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0}
HOPPER = SimpleNamespace(kind="cuda", ordinal=0, attribute=ATTRIBUTES.__getitem__)


class CompileError(Exception):
    """Error of a fake CuPy for invalid source."""


@pytest.fixture(autouse=True)
def forget_cupy():
    """Forget before and after each test whether CuPy works."""
    compiler.cupy_problem.cache_clear()
    yield
    compiler.cupy_problem.cache_clear()


@pytest.fixture
def fake_cupy(monkeypatch):
    """Return a function that replaces CuPy by a fake, whose RawModule calls its argument."""

    def replace(compile_module):
        cuda = SimpleNamespace(
            Device=lambda ordinal: contextlib.nullcontext(),
            compiler=SimpleNamespace(CompileException=CompileError),
        )

        def raw_module(**options):
            return SimpleNamespace(module=compile_module(options))

        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, RawModule=raw_module))

    return replace


@pytest.fixture
def images(monkeypatch):
    """Return a list to which images are appended in place of loading them."""
    loaded = []
    module = compiler.LoadedModule(7, None)
    monkeypatch.setattr(compiler, "load_binary", lambda image: (loaded.append(image), module)[1])
    return loaded


@pytest.fixture
def fake_nvrtc(monkeypatch):
    """Replace NVRTC by a fake, which returns the name of the target as the image."""
    monkeypatch.setattr(compiler, "missing_compiler", lambda: "")

    def compile_nvrtc(text, name, options, target, cache, key=""):
        return target.encode()

    monkeypatch.setattr(compiler, "compile_nvrtc", compile_nvrtc)


def missing_library(options):
    raise RuntimeError("libnvrtc.so.13 was not found\nsee the manual")


def test_cuda_extras_install_a_compiler():
    table = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    for name in ("cuda12", "cuda13"):
        (requirement,) = table["project"]["optional-dependencies"][name]
        assert requirement.startswith(f"cupy-{name}x[ctk]>=14.1,")


def test_working_cupy_compiles_kernels(fake_cupy, images):
    """A module of CuPy stays loaded as long as its owner lives."""
    module = SimpleNamespace(ptr=123)
    texts = []
    fake_cupy(lambda options: (texts.append(options["code"]), module)[1])
    loaded = compiler._compile_cuda(HOPPER, SOURCE)
    assert int(loaded.handle) == 123 and loaded.owner is module
    assert compiler.TEST_KERNEL in texts[-1]
    assert not images


def test_nvrtc_replaces_broken_cupy_with_one_warning(fake_cupy, fake_nvrtc, images):
    fake_cupy(missing_library)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiler._compile_cuda(HOPPER, SOURCE)
        compiler._compile_cuda(HOPPER, SOURCE)
    assert images == [b"sm_90", b"sm_90"]
    (warning,) = caught
    assert "libnvrtc.so.13 was not found)" in str(warning.message)


def test_nvrtc_compiles_kernels_without_cupy(fake_nvrtc, images, monkeypatch):
    """A missing CuPy is not an error, so there is no warning. `graft doctor` reports it."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiler._compile_cuda(HOPPER, SOURCE)
    assert images == [b"sm_90"]


@pytest.mark.filterwarnings("ignore:CuPy")
def test_missing_compilers_raise_kernel_error_with_advice(fake_cupy, monkeypatch):
    fake_cupy(missing_library)
    monkeypatch.setattr(compiler, "missing_compiler", lambda: "NVRTC cannot be loaded")
    with pytest.raises(KernelError) as info:
        compiler._compile_cuda(HOPPER, SOURCE)
    for words in ("one_line.cu", "libnvrtc.so.13", "NVRTC cannot be loaded", "cupy-cuda12x[ctk]"):
        assert words in str(info.value)


@pytest.mark.filterwarnings("ignore:CuPy")
def test_machine_code_that_the_driver_refuses_raises_kernel_error(
    fake_cupy, fake_nvrtc, monkeypatch
):
    """NVRTC of a newer CUDA version than the driver compiles code that the driver does not load."""

    def refuse(image):
        raise DeviceError("cuModuleLoadData failed with CUDA_ERROR_INVALID_IMAGE", code=200)

    fake_cupy(missing_library)
    monkeypatch.setattr(compiler, "load_binary", refuse)
    with pytest.raises(KernelError, match=r"INVALID_IMAGE.*cupy-cuda12x\[ctk\]"):
        compiler._compile_cuda(HOPPER, SOURCE)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (CompileError("line 1"), "does not compile:\nline 1"),
        (RuntimeError("no headers"), "headers"),
    ],
)
def test_errors_of_cupy_become_kernel_errors(fake_cupy, error, words):
    def compile_module(options):
        if "broken.cu" in options["code"]:
            raise error

    fake_cupy(compile_module)
    source = compiler.KernelSource("broken", "broken.cu", {}, None)
    with pytest.raises(KernelError, match=words):
        compiler._compile_cuda(HOPPER, source)


@pytest.mark.nvrtc
@pytest.mark.parametrize(("target", "begin"), [("sm_90", b"\x7fELF"), ("compute_90", b"//")])
def test_nvrtc_compiles_to_machine_code_and_ptx(tmp_path, target, begin):
    if nvrtc.missing_compiler():
        pytest.skip(nvrtc.missing_compiler())
    image = nvrtc.compile_nvrtc(compiler.TEST_KERNEL, "one_line.cu", [], target, tmp_path)
    assert image.lstrip().startswith(begin) and b"graft_test" in image
    (cached,) = tmp_path.iterdir()
    assert cached.read_bytes() == image
