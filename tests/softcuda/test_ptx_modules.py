"""Calls, function addresses and linking of PTX modules."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from ptx_util import HEADER, module
from test_ptx import STORE, outcome, run_body

pytestmark = pytest.mark.ptx

#: Device functions with register parameters, called through addresses too.
FUNCTIONS = """
.func (.reg .b32 %out) triple (.reg .b32 %in)
{ mul.lo.u32 %out, %in, 3; ret; }
.func (.reg .b32 %out) square (.reg .b32 %in)
{ .reg .pred %p<2>; mul.lo.u32 %out, %in, %in;
  setp.lt.u32 %p1, %in, 20; @%p1 ret; add.u32 %out, %out, 7; ret; }
.func (.param .b32 r) minus (.param .b32 a, .param .b32 b)
{ .reg .b32 %x<3>; ld.param.b32 %x0, [a]; ld.param.b32 %x1, [b]; sub.u32 %x2, %x0, %x1;
  st.param.b32 [r], %x2; ret; }
.func (.param .b32 r) plus (.param .b32 a, .param .b32 b)
{ .reg .b32 %x<3>; ld.param.b32 %x0, [a]; ld.param.b32 %x1, [b]; add.u32 %x2, %x0, %x1;
  st.param.b32 [r], %x2; ret; }
.global .align 8 .u64 table[2] = {plus, minus};
"""


def test_ptx_call_passes_registers(soft):
    body = """
        call (%r5), triple, (%r0);  call.uni (%r6), triple, (5);
        setp.gt.u32 %p1, %r0, 7;  @%p1 call (%r5), square, (%r5);
        add.u32 %r5, %r5, %r6;
    """ + STORE.format(0, "%r5")
    got = run_body(soft, body, [], np.zeros(32, np.uint32), declarations=FUNCTIONS)
    lane = np.arange(32)
    squares = (3 * lane) ** 2 + np.where(3 * lane < 20, 0, 7)
    np.testing.assert_array_equal(got, np.where(lane > 7, squares, 3 * lane) + 15)


INDIRECT = {
    "prototype": """
        P: .callprototype (.param .b32 _) _ (.param .b32 _, .param .b32 _);
        and.b32 %r5, %r0, 1;  mul.wide.u32 %rd5, %r5, 8;  mov.u64 %rd6, table;
        add.u64 %rd5, %rd5, %rd6;  ld.global.u64 %rd7, [%rd5];
        { .param .b32 x; .param .b32 y; .param .b32 z; st.param.b32 [x], 100;
          st.param.b32 [y], %r0; call (z), %rd7, (x, y), P; ld.param.b32 %r6, [z]; }
    """,
    "targets": """
        T: .calltargets plus, minus;
        and.b32 %r5, %r0, 1;  setp.eq.u32 %p1, %r5, 1;
        mov.u64 %rd5, minus;  mov.u64 %rd6, plus;  selp.b64 %rd7, %rd5, %rd6, %p1;
        { .param .b32 x; .param .b32 y; .param .b32 z; st.param.b32 [x], 100;
          st.param.b32 [y], %r0; call (z), %rd7, (x, y), T; ld.param.b32 %r6, [z]; }
    """,
}


@pytest.mark.parametrize("body", INDIRECT.values(), ids=INDIRECT)
def test_ptx_indirect_call_branches_by_lane(soft, body):
    body += "activemask.b32 %r7; popc.b32 %r7, %r7; mad.lo.u32 %r6, %r7, 1000, %r6;"
    body += STORE.format(0, "%r6")
    got = run_body(soft, body, [], np.zeros(32, np.uint32), declarations=FUNCTIONS)
    lane = np.arange(32)
    np.testing.assert_array_equal(got, 32000 + np.where(lane % 2 == 1, 100 - lane, 100 + lane))


def test_ptx_indirect_call_of_other_address_is_a_fault():
    body = "P: .callprototype _ (.reg .b32 _); mov.u64 %rd5, 4096; call %rd5, (%r0), P;"
    text = outcome(body)
    assert "0x1000 is not the address of a function" in text and "PTX line" in text


#: fib calls itself twice, and is_even and is_odd call each other.
RECURSIVE = """
.func (.param .b32 value) is_odd (.param .b32 count);
.func (.param .b32 value) fib (.param .b32 count) {
    .reg .b32 %a<6>;  .reg .pred %q;
    ld.param.u32 %a1, [count];
    mov.u32 %a2, %a1;
    setp.lt.u32 %q, %a1, 2;
    @%q bra DONE;
    sub.u32 %a3, %a1, 1;
    { .param .b32 p; .param .b32 r;
    st.param.b32 [p], %a3;  call.uni (r), fib, (p);  ld.param.b32 %a2, [r]; }
    sub.u32 %a3, %a1, 2;
    { .param .b32 p; .param .b32 r;
    st.param.b32 [p], %a3;  call.uni (r), fib, (p);  ld.param.b32 %a4, [r]; }
    @%q bra DONE;
    add.u32 %a2, %a2, %a4;
DONE:
    st.param.b32 [value], %a2;
    ret;
}
""" + "".join(
    f"""
.func (.param .b32 value) {name} (.param .b32 count) {{
    .reg .b32 %a<6>;  .reg .pred %q;  .param .b32 p;  .param .b32 r;
    ld.param.u32 %a1, [count];
    setp.eq.u32 %q, %a1, 0;
    @%q st.param.b32 [value], {result};
    @%q ret;
    sub.u32 %a1, %a1, 1;
    st.param.b32 [p], %a1;  call.uni (r), {other}, (p);  ld.param.b32 %a2, [r];
    st.param.b32 [value], %a2;
    ret;
}}
"""
    for name, other, result in (("is_even", "is_odd", 1), ("is_odd", "is_even", 0))
)
CALL = """{{ .param .b32 p; .param .b32 r;
    st.param.b32 [p], {}; call.uni (r), {}, (p); ld.param.b32 {}, [r]; }}
"""


@pytest.mark.parametrize("seed", ["", "1"])
def test_ptx_recursive_calls_equal_python(seed):
    """Lanes call functions to different depths, from two places."""
    body = CALL.format("%r6", "fib", "%r7") + CALL.format("%r0", "is_even", "%r8")
    body = f"rem.u32 %r6, %r0, 11; {body} mad.lo.u32 %r7, %r7, 10, %r8;" + STORE.format(1, "%r7")
    text = outcome(body, declarations=RECURSIVE, stack=4096, SOFTCUDA_PTX_SEED=seed)
    fib = [0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55]
    assert str([10 * fib[i % 11] + (i % 2 == 0) for i in range(32)])[1:-1] in text, text


def test_ptx_recursive_call_beyond_stack_limit_is_a_fault():
    body = "mov.u32 %r6, 40;" + CALL.format("%r6", "is_even", "%r8")
    text = outcome(body, declarations=RECURSIVE)
    assert "HARDWARE_STACK_ERROR" in text and "stack overflow" in text
    assert "CU_LIMIT_STACK_SIZE is 1024" in text and "PTX line" in text
    assert outcome(body, declarations=RECURSIVE, stack=1 << 16).startswith("SUCCESS")


UNSUPPORTED_RECURSION = {
    "arguments in registers": ".func f (.reg .b32 %a) { call f, (%a); ret; }",
    "local variables": ".func f (.param .b32 a) { .local .b32 x; call f, (a); ret; }",
}


@pytest.mark.parametrize("words", UNSUPPORTED_RECURSION)
def test_ptx_recursive_call_is_refused(soft, words):
    declarations = UNSUPPORTED_RECURSION[words]
    call = "call f, (%r0);" if "reg" in declarations else ".param .b32 p; call f, (p);"
    result = soft.d.cuModuleLoadData(module(call, declarations=declarations).encode() + b"\0")
    assert result[0].name == "CUDA_ERROR_NOT_SUPPORTED" and words in soft.refusal()


# ---- linking -----------------------------------------------------------------------------------

MAIN = module(
    """
    ld.global.u32 %r5, [shared_count];  ld.global.u32 %r6, [own];  add.u32 %r5, %r5, %r6;
    call (%r7), helper, (%r0);  add.u32 %r5, %r5, %r7;
    """
    + STORE.format(0, "%r5"),
    1,
    """
    .extern .global .align 4 .u32 shared_count;
    .global .align 4 .u32 own = 1000;
    .extern .func (.reg .b32 %o) helper (.reg .b32 %i);
    """,
)
LIBRARY = (
    HEADER
    + """
    .visible .global .align 4 .u32 shared_count = 7;
    .global .align 4 .u32 own = 5;
    .func (.reg .b32 %o) inner (.reg .b32 %i)
    { .reg .b32 %x; ld.global.u32 %x, [own]; mul.lo.u32 %o, %i, %x; ret; }
    .visible .func (.reg .b32 %o) helper (.reg .b32 %i)
    { .shared .align 4 .b32 s; call (%o), inner, (%i); ret; }
    """
)
PTX = 1


def link(soft, *texts: str, log: bytearray | None = None):
    """Link texts. Return the state and the result of the first call that failed or of the last."""
    names, values = [], []
    if log is not None:
        option = soft.d.CUjit_option
        names = [option.CU_JIT_ERROR_LOG_BUFFER, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        values = [log, len(log)]
    state = soft.cuLinkCreate(len(names), names, values)
    kind = soft.d.CUjitInputType(PTX)
    for text in texts:
        data = text.encode() + b"\0"
        result = soft.d.cuLinkAddData(state, kind, data, len(data), b"text", 0, [], [])
        if int(result[0]) != 0:
            return state, result
    return state, soft.d.cuLinkComplete(state)


def image_of(result) -> bytes:
    return ctypes.string_at(int(result[1]), result[2])


def test_linked_modules_share_visible_names_only(soft):
    state, result = link(soft, MAIN, LIBRARY)
    assert result[0].name == "CUDA_SUCCESS"
    image = image_of(result)
    soft.cuLinkDestroy(state)
    loaded = soft.cuModuleLoadData(image)
    out = soft.put(np.zeros(32, np.uint32))
    soft.run(soft.cuModuleGetFunction(loaded, b"k"), 1, 32, out)
    np.testing.assert_array_equal(soft.get(out, 32, np.uint32), 1007 + 5 * np.arange(32))
    soft.cuModuleUnload(loaded)


def test_module_variable_has_address_and_size(soft):
    declarations = """
    .visible .global .align 8 .b8 words[16];  .visible .const .align 4 .u32 factor = 6;
    """
    body = "ld.const.u32 %r5, [factor];  st.global.u32 [words+4], %r5;"
    loaded = soft.cuModuleLoadData(module(body, 1, declarations).encode() + b"\0")
    pointer, size = soft.cuModuleGetGlobal(loaded, b"words")
    assert size == 16
    factor, size = soft.cuLibraryGetGlobal(soft.d.CUlibrary(int(loaded)), b"factor")
    assert size == 4
    value = np.array([70], np.uint32)
    soft.cuMemcpyHtoD(factor, value.ctypes.data, 4)
    soft.run(soft.cuModuleGetFunction(loaded, b"k"), 1, 1, soft.put(value))
    np.testing.assert_array_equal(soft.get(pointer, 4, np.uint32), [0, 70, 0, 0])
    assert soft.d.cuModuleGetGlobal(loaded, b"none")[0].name == "CUDA_ERROR_NOT_FOUND"
    soft.cuModuleUnload(loaded)


LINK_ERRORS = {
    "undefined variable": ((MAIN,), "INVALID_PTX", "'shared_count' is external and not defined"),
    "undefined function": (
        (MAIN.replace("[shared_count]", "[own]"),),
        "NOT_SUPPORTED",
        "the function 'helper'",
    ),
    "defined twice": ((MAIN, LIBRARY, LIBRARY), "INVALID_PTX", "in two modules"),
    "syntax": ((MAIN, LIBRARY[:-8]), "INVALID_PTX", "line"),
    "second text": (
        (MAIN, LIBRARY.replace("mul.lo.u32 %o", "mul.lo.u32 %q")),
        "INVALID_PTX",
        "PTX text 2 line 8",
    ),
}


@pytest.mark.parametrize("case", LINK_ERRORS.values(), ids=LINK_ERRORS)
def test_link_error_is_in_log(soft, case):
    texts, error, words = case
    log = bytearray(400)
    state, result = link(soft, *texts, log=log)
    assert error in result[0].name
    assert words in bytes(log).rstrip(b"\0").decode()
    soft.cuLinkDestroy(state)


def test_link_refuses_other_inputs(soft, tmp_path):
    state = soft.cuLinkCreate(0, [], [])
    kind = soft.d.CUjitInputType
    result = soft.d.cuLinkAddData(state, kind.CU_JIT_INPUT_CUBIN, b"x", 1, b"", 0, [], [])
    assert result[0].name == "CUDA_ERROR_NOT_SUPPORTED"
    missing = str(tmp_path / "none.ptx").encode()
    result = soft.d.cuLinkAddFile(state, kind.CU_JIT_INPUT_PTX, missing, 0, [], [])
    assert result[0].name == "CUDA_ERROR_FILE_NOT_FOUND"
    assert soft.d.cuLinkComplete(state)[0].name == "CUDA_ERROR_INVALID_VALUE"
    path = tmp_path / "main.ptx"
    path.write_text(module(STORE.format(0, "%r0"), 1))
    soft.cuLinkAddFile(state, kind.CU_JIT_INPUT_PTX, str(path).encode(), 0, [], [])
    assert soft.d.cuLinkComplete(state)[0].name == "CUDA_SUCCESS"
    soft.cuLinkDestroy(state)
    assert soft.d.cuLinkDestroy(state)[0].name == "CUDA_ERROR_INVALID_HANDLE"


def test_function_attribute_static_shared_memory_is_known_for_ptx(soft):
    """The attribute is the size of the kernel's shared variables."""
    text = b""".version 8.0
.target sm_90
.address_size 64
.visible .entry idle() {
  .shared .align 4 .b8 buffer[100];
  ret;
}
"""
    module = soft.cuModuleLoadData(text)
    function = soft.cuModuleGetFunction(module, b"idle")
    attribute = soft.d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    assert soft.cuFuncGetAttribute(attribute, function) == 100
    soft.cuModuleUnload(module)
