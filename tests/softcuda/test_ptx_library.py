"""The PTX library: how it is built when it is first needed, and how the soft device loads it.

The tests use a stand-in for the library, because the library takes long to compile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import softcuda_util as util

from graft.cudagraph.errors import KernelError
from graft.cudagraph.kernels.ptx import provide_ptx_library

TEXT = ".version 8.0 // a text for the stand-in"


def run_json(code: str, **env: str):
    """Run code with a new soft device and return the JSON that it prints."""
    done = util.run_child("import json\n" + textwrap.dedent(code), **env)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return json.loads(done.stdout)


# ---- loading of the library ------------------------------------------------------------------


def test_ptx_without_library_is_refused_and_may_be_tried_again(ptx_stub, tmp_path):
    code = f"""
        import os
        text = {TEXT!r}.encode() + b"\\0"
        first = d.cuModuleLoadData(text)[0].name, s.refusal()
        os.environ["SOFTCUDA_PTX_LIBRARY"] = {str(ptx_stub)!r}
        print(json.dumps([*first, d.cuModuleLoadData(text)[0].name]))
    """
    missing = str(tmp_path / "absent.so")
    error, text, second = run_json(code, SOFTCUDA_PTX_LIBRARY=missing)
    assert error == "CUDA_ERROR_JIT_COMPILER_NOT_FOUND"
    assert missing in text and "graft soft --code ptx builds it" in text
    assert second == "CUDA_SUCCESS"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-DSTUB_ABI=SOFTCUDA_PTX_ABI+1"], "has the interface"),
        (["-Dsoftcuda_ptx_library_v=other"], "is another library"),
    ],
)
def test_ptx_library_with_another_interface_is_refused(options, words, tmp_path):
    library = util.build_ptx_stub(tmp_path / "libgraft_ptx.so", *options)
    code = f"print(json.dumps([d.cuModuleLoadData({TEXT!r}.encode())[0].name, s.refusal()]))"
    error, text = run_json(code, SOFTCUDA_PTX_LIBRARY=str(library))
    assert error == "CUDA_ERROR_JIT_COMPILER_NOT_FOUND"
    assert words in text and str(library) in text


def test_device_launches_kernels_of_ptx_library(ptx_stub):
    """The library gets all blocks and the parameters, and its error becomes the sticky error."""
    code = f"""
        import ctypes
        module = s.cuModuleLoadData({TEXT!r}.encode() + b"\\0")
        kernel = s.cuModuleGetFunction(module, b"k")
        shared = s.cuFuncGetAttribute(d.CUfunction_attribute(1), kernel)
        p = s.ints(0)
        def launch(address):
            arguments = (address,), (ctypes.c_void_p,)
            return d.cuLaunchKernel(kernel, 1000, 2, 1, 32, 1, 1, 0, 0, arguments, 0)
        launch(int(p))
        value = s.value(p)
        launch(int(p) + 4)
        code = d.cuCtxSynchronize()[0].name
        print(json.dumps([shared, int(value), code, s.fault()]))
    """
    shared, value, error, text = run_json(code, SOFTCUDA_PTX_LIBRARY=str(ptx_stub))
    assert (shared, value, error) == (100, 2000, "CUDA_ERROR_ILLEGAL_ADDRESS")
    assert "0 bytes past the end of device allocation" in text


def test_ptx_library_errors_reach_the_log_and_the_caller(ptx_stub):
    code = f"""
        wrong = {TEXT!r}.encode() + b" wrong\\0"
        load = d.cuModuleLoadData(wrong)[0].name, s.refusal()
        state = s.cuLinkCreate(0, [], [])
        kind = d.CUjitInputType.CU_JIT_INPUT_PTX
        link = d.cuLinkAddData(state, kind, wrong, len(wrong), b"", 0, [], [])[0].name, s.refusal()
        print(json.dumps([load, link]))
    """
    expected = ["CUDA_ERROR_INVALID_PTX", "the text is wrong"]
    assert run_json(code, SOFTCUDA_PTX_LIBRARY=str(ptx_stub)) == [expected, expected]


# ---- build when it is first needed ---------------------------------------------------------------

#: Stands for the C++ compiler: appends its arguments to LOG and writes the output file.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "$VERSION"; exit; fi
echo "$@" >> "$LOG"
case "$*" in *"$BROKEN"*) [ -z "$BROKEN" ] || { echo "no luck" >&2; exit 1; };; esac
sleep 0.02
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""
BUILD = """
import sys
import textwrap
from pathlib import Path
from graft.native.softcuda import ptx_library
from graft.native.softcuda.compile import KernelCompileError
if sys.argv[2] == "old":
    ptx_library.processor_flags = lambda: "flags: sse2"
try:
    print(ptx_library.build_ptx_library(Path(sys.argv[1])).name)
except KernelCompileError as error:
    print(error.name, error.log)
"""


class FakeBuild:
    """Builds the library with a stand-in for the compiler, in child processes."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.log = folder / "log"
        self.compiler = folder / "c++"
        self.compiler.write_text(COMPILER)
        self.compiler.chmod(0o755)

    def start(self, processor: str = "", **env: str) -> subprocess.Popen[str]:
        variables = {"CXX": str(self.compiler), "LOG": str(self.log), "BROKEN": "", "VERSION": "1"}
        return subprocess.Popen(
            [sys.executable, "-c", BUILD, str(self.cache), processor],
            env=os.environ | variables | env,
            text=True,
            stdout=subprocess.PIPE,
        )

    def run(self, processor: str = "", **env: str) -> str:
        return self.start(processor, **env).communicate()[0].strip()

    def links(self) -> int:
        return self.log.read_text().count("-shared")


@pytest.fixture
def fake(tmp_path) -> FakeBuild:
    return FakeBuild(tmp_path)


def test_ptx_library_is_compiled_once_for_concurrent_processes(fake):
    names = [process.communicate()[0] for process in [fake.start() for _ in range(3)]]
    assert len(set(names)) == 1 and fake.links() == 1
    assert (fake.cache / names[0].strip()).read_text() == "compiled\n"
    sources = list((util.SOURCE / "ptx").glob("*.cpp"))
    assert len(fake.log.read_text().splitlines()) == len(sources) + 1


def test_ptx_library_depends_on_compiler_and_processor(fake):
    """Machines that share a cache use different files, unless the instruction sets are equal."""
    names = [fake.run("old"), fake.run("old", VERSION="2"), fake.run("old")]
    assert names[0] == names[2] != names[1]
    assert fake.links() == 2
    assert "-mavx2" not in fake.log.read_text()


def test_ptx_library_that_does_not_compile_is_tried_again(fake):
    """The error names the source and contains the compiler's output."""
    assert fake.run(BROKEN="runner.cpp") == "ptx/runner.cpp no luck"
    assert not list(fake.cache.glob("*.so"))
    assert fake.run().endswith(".so")


def test_ptx_library_without_compiler_is_an_error(fake):
    assert "no C++ compiler was found" in fake.run(CXX="absent-compiler")


def test_ptx_library_in_unusable_cache_is_an_error(tmp_path, monkeypatch):
    """The error of a folder that cannot be written is one of graft's errors."""
    monkeypatch.delenv("SOFTCUDA_PTX_LIBRARY", raising=False)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(KernelError, match=r"the PTX library cannot be kept in .*file"):
        provide_ptx_library(file)


def test_ptx_library_includes_only_files_of_the_wheel():
    """The wheel contains the folders ptx/ and include/, from which the library is compiled."""
    folder = util.SOURCE / "ptx"
    included = set()
    for path in [*folder.glob("*.cpp"), *folder.glob("*.h")]:
        for line in path.read_text().splitlines():
            if line.startswith('#include "'):
                included.add(line.split('"')[1])
    assert included
    for name in included:
        assert (folder / name).is_file() or (util.SOURCE / "include" / name).is_file(), name
