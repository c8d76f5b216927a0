"""Tests of the errors for grammar libraries that are missing or incompatible."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

import pytest
from guide_util import accepts, byte_vocabulary, output_of

from graft.cudagraph.errors import OptionError
from graft.grammar import GrammarError, GrammarService, GrammarSpec, processes, usable
from graft.grammar.backends import llguidance as llguidance_module
from graft.grammar.backends import xgrammar as xgrammar_module
from graft.grammar.backends.llguidance import LLGuidanceBackend
from graft.grammar.backends.xgrammar import XGrammarBackend
from graft.grammar.compile import service as service_module
from graft.native.children.process import ProcessPool
from graft.native.softcuda.compile import compiler
from graft.tools import doctor

HEADERS = Path(__file__).resolve().parents[2] / "native" / "guide"
SYMBOLS = [
    "new_tokenizer_v2",
    "free_tokenizer",
    "new_matcher",
    "free_matcher",
    "matcher_get_error",
    "matcher_validate_tokens",
    "matcher_consume_token",
    "matcher_consume_tokens",
    "clone_matcher",
    "matcher_rollback",
    "matcher_reset",
    "matcher_compute_mask",
    "matcher_get_mask",
    "matcher_is_accepting",
    "validate_grammar",
]


def build(folder: Path, text: str) -> Path:
    """Compile a shared library from C++ text."""
    source = folder / "lib.cpp"
    library = folder / "lib.so"
    source.write_text(text)
    command = [
        *compiler(),
        "-std=c++17",
        "-shared",
        "-fPIC",
        f"-I{HEADERS}",
        str(source),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return library


def llguidance_like(version: str, *, without: str = "", defaults: str = "") -> str:
    """Return the C++ source of a library with LLGuidance's symbols."""
    functions = [
        f'const char* llg_get_version() {{ return "{version}"; }}',
        f"void llg_constraint_init_set_defaults(unsigned char* o, const void* t) {{ {defaults} }}",
        *(f"int llg_{name}() {{ return 0; }}" for name in SYMBOLS if name != without),
    ]
    return 'extern "C" {\n' + "\n".join(functions) + "\n}\n"


def load(kind: str, library: Path) -> str:
    """Load a library in a new process and return the native loader's error."""
    code = (
        "import ctypes, os, sys\nfrom graft.native import _native\n"
        "if os.path.exists(sys.argv[1]):\n    ctypes.CDLL(sys.argv[1])\n"
        f"try:\n    _native.guide.load_{kind}(sys.argv[1])\n"
        "except RuntimeError as error:\n    print(error)\n"
    )
    return output_of(code, str(library))


def tvm_ffi_like(*, version: int = 1, method: str = "", arguments: str = "", key: int = 0) -> str:
    """Return the C++ source of a library with TVM-FFI's symbols.

    Parameters
    ----------
    version
        Minor version of the C ABI.
    method, arguments
        Name of the only method of the matcher type, and the members of its metadata as JSON.
    key
        Index of the matcher type; -1 if the type is not registered.
    """
    return f"""
#include "tvm_ffi_abi.h"
using namespace graft::tvm_ffi;
static MethodInfo methods[1];
static TypeInfo type;
static char metadata[] = R"({{{arguments}}})";
extern "C" {{
void TVMFFIGetVersion(Version* v) {{ *v = {{0, {version}, 0}}; }}
int TVMFFITypeKeyToIndex(const Bytes*, int32_t*) {{ return {key}; }}
const TypeInfo* TVMFFIGetTypeInfo(int32_t) {{
  methods[0].name = {{"{method}", sizeof("{method}") - 1}};
  methods[0].metadata = {{metadata, sizeof(metadata) - 1}};
  methods[0].method.type_index = kFunction;
  type.num_methods = 1;
  type.methods = methods;
  return &type;
}}
int TVMFFIFunctionCall() {{ return 0; }}
int TVMFFIErrorMoveFromRaised() {{ return 0; }}
int TVMFFIObjectDecRef() {{ return 0; }}
}}
"""


FILL = "fill_next_token_bitmask"
FILL_PARAMETERS = (
    '{"type":"xgrammar.tvm_ffi_binding.GrammarMatcher"},{"type":"Any"},{"type":"int"},'
    '{"type":"bool"}'
)
FILL_TYPES = f'"args":[{{"type":"bool"}},{FILL_PARAMETERS}]'
FILL_NAMED_TYPES = f'"named_args":{{"return":[{{"type":"bool"}}],"params":[{FILL_PARAMETERS}]}}'


@pytest.mark.parametrize(
    "kind, text, message",
    [
        (
            "llguidance",
            llguidance_like("llguidance@2.0.0"),
            "is llguidance@2.0.0, graft knows llguidance@1.9.x",
        ),
        (
            "llguidance",
            llguidance_like("llguidance@1.9.1", without="matcher_reset"),
            "no symbol llg_matcher_reset",
        ),
        (
            "llguidance",
            llguidance_like("llguidance@1.9.9"),
            "another layout",
        ),  # writes no default values
        (
            "llguidance",
            llguidance_like("llguidance@1.9.9", defaults="o[100] = 0;"),
            "another layout",
        ),
        ("llguidance", "int nothing;", "no symbol llg_get_version"),
        ("llguidance", "", "LLGuidance is not loaded from /nowhere/_lib.so"),
        ("xgrammar", tvm_ffi_like(version=2), "C ABI is version 0.2, graft knows 0.1"),
        (
            "xgrammar",
            tvm_ffi_like(key=-1),
            "has not registered xgrammar.tvm_ffi_binding.GrammarMatcher",
        ),
        ("xgrammar", tvm_ffi_like(method="fill"), f"no method {FILL}"),
        (
            "xgrammar",
            tvm_ffi_like(method=FILL, arguments='"args":[{"type":"bool"}]'),
            f"{FILL} has another signature",
        ),
        (
            "xgrammar",
            tvm_ffi_like(method=FILL, arguments=FILL_TYPES.replace('{"type":"int"},', "")),
            f"{FILL} has another signature",
        ),
        # The only method has the right signature in the notation of 0.2.8 or of 0.2.9.
        ("xgrammar", tvm_ffi_like(method=FILL, arguments=FILL_TYPES), "no method accept_token"),
        (
            "xgrammar",
            tvm_ffi_like(method=FILL, arguments=FILL_NAMED_TYPES),
            "no method accept_token",
        ),
        ("xgrammar", "int nothing;", "no symbol TVMFFIGetVersion"),
    ],
)
def test_native_loader_rejects_incompatible_libraries(tmp_path, kind, text, message):
    """The error names the version, symbol, layout, type, method or signature that differs."""
    assert message in load(kind, build(tmp_path, text) if text else Path("/nowhere/_lib.so"))


def test_loading_xgrammar_keeps_signal_handler():
    """TVM-FFI installs a SIGSEGV handler. After loading, the previous handler must be active."""
    code = (
        "import ctypes\nfrom graft.grammar.backends.xgrammar import library\n"
        "def handler():\n"
        "    action = (ctypes.c_void_p * 32)()\n"
        "    ctypes.CDLL(None).sigaction(11, None, action)\n"
        "    return action[0]\n"
        "import faulthandler\nfaulthandler.enable()\n"
        "before = handler()\nlibrary()\nprint(before is not None and before == handler())\n"
    )
    assert output_of(code) == "True\n"


@pytest.fixture(
    params=[
        (llguidance_module, LLGuidanceBackend, "llguidance", "LLGuidance", doctor.check_llguidance),
        (xgrammar_module, XGrammarBackend, "xgrammar", "XGrammar", doctor.check_xgrammar),
    ],
    ids=["llguidance", "xgrammar"],
)
def library(request, monkeypatch):
    """Yield a backend's module, class, package, name and doctor check.

    The caches of loaded libraries are empty during the test.
    """
    caches = [llguidance_module.load_native, xgrammar_module.load_native, xgrammar_module.library]
    for cache in caches:
        cache.cache_clear()
    yield request.param
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


class IncompatibleNative:
    """A replacement for the native module that rejects every library."""

    def __getattr__(self, attribute):
        raise RuntimeError("the ABI is another one")


@pytest.mark.parametrize("release", [True, False], ids=["release", "ABI"])
def test_backend_rejects_incompatible_library(monkeypatch, library, release):
    """The backend and `graft doctor` report why a library is rejected.

    A library of an unsupported version is not loaded.
    """
    module, backend, package, name, check = library
    real = importlib.metadata.version
    if release:
        message = f"{name} 9.9.0 is installed, but graft needs .*pip install"
        why = "9.9.0"
        monkeypatch.setattr(
            importlib.metadata,
            "version",
            lambda asked: "9.9.0" if asked == package else real(asked),
        )
    else:
        message = f"graft cannot call the installed {name}: the ABI is another"
        why = "the ABI is another"
        monkeypatch.setattr(module, "_native", type("Native", (), {"guide": IncompatibleNative()}))
    with pytest.raises(OptionError, match=message):
        backend(byte_vocabulary())
    found = check()
    expected = {"llguidance": "missing", "xgrammar": "absent"}  # graft works without XGrammar
    assert found.status == expected[package] and why in found.detail
    assert "pip install" in found.advice or not release


def test_backend_reports_missing_library(monkeypatch, serve, library):
    """The error contains the installation command.

    The error is raised if the library of the engine's backend is missing, and if the library of the
    backend that a grammar names is missing.
    """
    package, name = library[2:4]
    real = importlib.metadata.version

    def version(asked):
        if asked == package:
            raise importlib.metadata.PackageNotFoundError(asked)
        return real(asked)

    monkeypatch.setattr(importlib.metadata, "version", version)
    message = f"grammar_backend: {name} is not installed; install it with: pip install .*{package}"
    # Services of other tests may still be alive. A vocabulary of another size ensures that their
    # backends are not shared.
    vocabulary = byte_vocabulary(271)
    with pytest.raises(OptionError, match=message):
        GrammarService(vocabulary, package)
    other = "llguidance" if package == "xgrammar" else "xgrammar"
    service = serve(other, vocabulary)
    with pytest.raises(GrammarError, match=f"regex: {message}"):
        service.submit(GrammarSpec("regex", "a", backend=package)).result(300)


def test_native_loader_rejects_llguidance_that_behaves_differently():
    """A library with the right version, symbols and layout is rejected if its masks are wrong.

    The library passes all calls on to LLGuidance, except that no grammar ever accepts.
    """
    code = (
        "import ctypes, llguidance, sys\nfrom graft.native import _native\n"
        "real = ctypes.CDLL(llguidance._lib.__file__)\n"
        "memory = ctypes.cast(real.llg_matcher_is_accepting, ctypes.c_void_p).value\n"
        "page = memory & ~4095\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]\n"
        "assert libc.mprotect(page, 8192, 7) == 0\n"
        "ctypes.memmove(memory, bytes([0x31, 0xC0, 0xC3]), 3)  # xor eax, eax; ret\n"
        "for attempt in range(2):\n"
        "    try:\n        _native.guide.load_llguidance(llguidance._lib.__file__)\n"
        "    except RuntimeError as error:\n        print(error)\n"
    )
    message = "LLGuidance behaves differently from release 1.9: mask of a final state\n"
    assert output_of(code) == message * 2


@pytest.fixture
def unusable_xgrammar(tmp_path, monkeypatch):
    """Yield after hiding the tested version of XGrammar from this and from child processes."""
    folder = tmp_path / "xgrammar-9.9.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: xgrammar\nVersion: 9.9.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(processes, "POOL", ProcessPool(preload=("graft.grammar",)))
    monkeypatch.setattr(service_module, "POOL", processes.POOL)
    caches = [xgrammar_module.load_native, xgrammar_module.library, usable.warn_if_unusable]
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_auto_backend_falls_back_to_llguidance(unusable_xgrammar, serve, caplog):
    """LLGuidance compiles what it supports. ``check`` and the service refuse the same grammars."""
    service = serve("auto", byte_vocabulary(273))
    served = GrammarSpec.ebnf('root ::= "a" [0-9]')
    served.check()
    compiled = service.submit(served).result(120)
    assert isinstance(compiled.backend, LLGuidanceBackend)
    assert accepts(compiled, "a1") and not accepts(compiled, "ab")
    assert "XGrammar 9.9.0 is installed" in caplog.text
    form = {"type": "json_schema", "json_schema": {"type": "object"}, "style": "qwen_xml"}
    for spec in (
        GrammarSpec.structural_format(form),
        GrammarSpec("regex", "a", backend="xgrammar"),
    ):
        with pytest.raises(GrammarError, match=r"XGrammar 9\.9\.0 is installed") as checked:
            spec.check()
        with pytest.raises(GrammarError) as compiled_error:
            service.submit(spec).result(120)
        assert str(checked.value) in str(compiled_error.value)
