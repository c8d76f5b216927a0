"""The PTX front end of the soft device: instructions against NumPy, faults, refusals and races."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import softcuda_util as util
from ptx_util import HEADER, elementwise, module
from softcuda_util import code

from graft.cudagraph.errors import DeviceError
from graft.cudagraph.kernels import nvrtc, ptx

pytestmark = pytest.mark.ptx

RNG = np.random.default_rng(1)
DTYPES = {
    "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "f16": np.float16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "b64": np.uint64,
    "u64": np.uint64, "s64": np.int64, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
COUNT = 64


def values_of(kind: str) -> np.ndarray:
    """Return test values of a PTX type: random ones, extreme ones and, for floats, special ones."""
    dtype = np.dtype(DTYPES[kind])
    if dtype.kind == "f":
        values = (RNG.standard_normal(COUNT) * 10.0 ** RNG.integers(-3, 4, COUNT)).astype(dtype)
        tiny = np.finfo(dtype).smallest_subnormal
        special = [0.0, -0.0, np.inf, -np.inf, 1.0, -1.5, 2.5, tiny, np.finfo(dtype).max]
        values[: len(special)] = special
        RNG.shuffle(values)
        return values
    limits = np.iinfo(dtype)
    values = RNG.integers(limits.min, limits.max, COUNT, dtype, endpoint=True)
    values[:4] = [limits.min, limits.max, 0, 1]
    values[4:16] = RNG.integers(0, 40, 12)
    RNG.shuffle(values)
    return values


def truncated_division(a, b):
    quotient = np.abs(a.astype(object)) // np.maximum(np.abs(b.astype(object)), 1)
    signed = np.where((a < 0) != (b < 0), -quotient, quotient)
    return np.where(b == 0, -1, signed)


def wrap(values, kind: str) -> np.ndarray:
    """Reduce Python integers to the bits of an integer type."""
    dtype = np.dtype(DTYPES[kind])
    bits = 8 * dtype.itemsize
    words = [int(value) % (1 << bits) for value in np.asarray(values, object).ravel()]
    return np.array(words, f"u{dtype.itemsize}").view(dtype)


def o(array: np.ndarray) -> np.ndarray:
    return array.astype(object)


def shift_left(a, b):
    return [int(x) << int(y) if y < 64 else 0 for x, y in zip(a, b, strict=True)]


def shift_right(a, b):
    return [int(x) >> min(int(y), 64) for x, y in zip(a, b, strict=True)]


def bit_field(a, b, c):
    return [
        (int(x) >> (int(y) & 255)) & ((1 << (int(z) & 255)) - 1)
        for x, y, z in zip(a, b, c, strict=True)
    ]


def permute(a, b, c):
    out = []
    for x, y, s in zip(a, b, c, strict=True):
        both = int(x) | int(y) << 32
        word = 0
        for k in range(4):
            nibble = int(s) >> 4 * k & 15
            byte = both >> 8 * (nibble & 7) & 255
            if nibble & 8:
                byte = 255 if byte & 128 else 0
            word |= byte << 8 * k
        out.append(word)
    return out


INTEGER_CASES = [
    ("add.s32 {d}, {a}, {b};", ("s32", "s32"), "s32", lambda a, b: o(a) + o(b)),
    ("sub.u64 {d}, {a}, {b};", ("u64", "u64"), "u64", lambda a, b: o(a) - o(b)),
    ("add.s16 {d}, {a}, {b};", ("s16", "s16"), "s16", lambda a, b: o(a) + o(b)),
    ("mul.lo.s32 {d}, {a}, {b};", ("s32", "s32"), "s32", lambda a, b: o(a) * o(b)),
    ("mul.lo.u16 {d}, {a}, {b};", ("u16", "u16"), "u16", lambda a, b: o(a) * o(b)),
    ("mul.hi.s32 {d}, {a}, {b};", ("s32", "s32"), "s32", lambda a, b: o(a) * o(b) >> 32),
    ("mul.hi.u64 {d}, {a}, {b};", ("u64", "u64"), "u64", lambda a, b: o(a) * o(b) >> 64),
    ("mul.wide.s32 {d}, {a}, {b};", ("s32", "s32"), "s64", lambda a, b: o(a) * o(b)),
    ("mul.wide.u16 {d}, {a}, {b};", ("u16", "u16"), "u32", lambda a, b: o(a) * o(b)),
    ("mad.lo.s32 {d}, {a}, {b}, {c};", ("s32",) * 3, "s32", lambda a, b, c: o(a) * o(b) + o(c)),
    ("mad.hi.u32 {d}, {a}, {b}, {c};", ("u32",) * 3, "u32",
     lambda a, b, c: (o(a) * o(b) >> 32) + o(c)),
    ("mad.wide.u32 {d}, {a}, {b}, {c};", ("u32", "u32", "u64"), "u64",
     lambda a, b, c: o(a) * o(b) + o(c)),
    ("div.s32 {d}, {a}, {b};", ("s32", "s32"), "s32", truncated_division),
    ("div.u64 {d}, {a}, {b};", ("u64", "u64"), "u64", truncated_division),
    ("rem.u32 {d}, {a}, {b};", ("u32", "u32"), "u32",
     lambda a, b: np.where(b == 0, o(a), o(a) % np.where(b == 0, 1, o(b)))),
    ("min.s32 {d}, {a}, {b};", ("s32", "s32"), "s32", np.minimum),
    ("max.u64 {d}, {a}, {b};", ("u64", "u64"), "u64", np.maximum),
    ("abs.s32 {d}, {a};", ("s32",), "s32", lambda a: abs(o(a))),
    ("neg.s64 {d}, {a};", ("s64",), "s64", lambda a: -o(a)),
    ("not.b32 {d}, {a};", ("u32",), "u32", np.invert),
    ("and.b64 {d}, {a}, {b};", ("u64", "u64"), "u64", np.bitwise_and),
    ("xor.b16 {d}, {a}, {b};", ("u16", "u16"), "u16", np.bitwise_xor),
    ("lop3.b32 {d}, {a}, {b}, {c}, 0xE2;", ("u32",) * 3, "u32",
     lambda a, b, c: (b & a) | (~b & c)),
    ("shl.b32 {d}, {a}, {b};", ("u32", "u32"), "u32", shift_left),
    ("shr.u64 {d}, {a}, {b};", ("u64", "u32"), "u64", shift_right),
    ("shr.s32 {d}, {a}, {b};", ("s32", "u32"), "s32", shift_right),
    ("shf.l.wrap.b32 {d}, {a}, {b}, {c};", ("u32",) * 3, "u32",
     lambda a, b, c: ((o(b) << 32 | o(a)) << (o(c) & 31)) >> 32),
    ("bfe.u32 {d}, {a}, {b}, {c};", ("u32",) * 3, "u32", bit_field),
    ("prmt.b32 {d}, {a}, {b}, {c};", ("u32",) * 3, "u32", permute),
    ("prmt.b32 {d}, {a}, {b}, 0x7610;", ("u32", "u32"), "u32",
     lambda a, b: permute(a, b, [0x7610] * len(a))),
    ("popc.b64 {d}, {a};", ("u64",), "u32", lambda a: [int(x).bit_count() for x in a]),
    ("clz.b32 {d}, {a};", ("u32",), "u32", lambda a: [32 - int(x).bit_length() for x in a]),
    ("brev.b32 {d}, {a};", ("u32",), "u32", lambda a: [int(f"{x:032b}"[::-1], 2) for x in a]),
    ("bfind.u32 {d}, {a};", ("u32",), "u32", lambda a: [int(x).bit_length() - 1 for x in a]),
    ("cvt.s64.s32 {d}, {a};", ("s32",), "s64", lambda a: o(a)),
    ("cvt.u16.u32 {d}, {a};", ("u32",), "u16", lambda a: o(a)),
    ("cvt.sat.s8.s32 {d}, {a};", ("s32",), "s32", lambda a: np.clip(o(a), -128, 127)),
    ("dp4a.s32.s32 {d}, {a}, {b}, {c};", ("s32",) * 3, "s32",
     lambda a, b, c: (a.view(np.int8).astype(object) * b.view(np.int8)).reshape(-1, 4).sum(1)
     + o(c)),
]  # fmt: skip


def run_elementwise(soft, text: str, arrays, kind: str) -> np.ndarray:
    loaded = soft.cuModuleLoadData(text.encode() + b"\0")
    function = soft.cuModuleGetFunction(loaded, b"k")
    out = soft.put(np.zeros(COUNT, DTYPES[kind]))
    inputs = [soft.put(array) for array in arrays]
    inputs += [inputs[0]] * (3 - len(inputs))
    soft.run(function, 1, COUNT, *inputs, out)
    soft.cuModuleUnload(loaded)
    return soft.get(out, COUNT, DTYPES[kind])


@pytest.mark.parametrize(
    ("text", "inputs", "kind", "oracle"),
    INTEGER_CASES,
    ids=[case[0].split()[0] for case in INTEGER_CASES],
)
def test_ptx_integer_instruction_equals_numpy(soft, text, inputs, kind, oracle):
    arrays = [values_of(name) for name in inputs]
    got = run_elementwise(soft, elementwise(text, inputs, kind), arrays, kind)
    np.testing.assert_array_equal(got, wrap(oracle(*arrays), kind))


def flush(values: np.ndarray) -> np.ndarray:
    """Replace subnormal values by zeros of their sign."""
    limit = np.finfo(values.dtype).tiny
    return np.where(np.abs(values) < limit, np.copysign(values.dtype.type(0), values), values)


def fused(a, b, c):
    # The product is exact in float64, and no test value makes the double rounding visible.
    return (a.astype(np.longdouble) * b + c).astype(np.float32)


def clamp_to_integer(values, low, high):
    finite = np.nan_to_num(np.trunc(values.astype(np.float64)), nan=0.0, posinf=high, neginf=low)
    return [int(min(max(value, low), high)) for value in finite]


FLOAT_CASES = [
    ("add.rn.f32 {d}, {a}, {b};", ("f32", "f32"), "f32", lambda a, b: a + b),
    ("add.ftz.f32 {d}, {a}, {b};", ("f32", "f32"), "f32", lambda a, b: flush(flush(a) + flush(b))),
    ("mul.f32 {d}, {a}, {b};", ("f32", "f32"), "f32", lambda a, b: a * b),
    ("mul.rz.f32 {d}, {a}, {b};", ("f32", "f32"), "f32", None),
    ("sub.f64 {d}, {a}, {b};", ("f64", "f64"), "f64", lambda a, b: a - b),
    ("div.rn.f32 {d}, {a}, {b};", ("f32", "f32"), "f32", lambda a, b: a / b),
    ("sqrt.rn.f32 {d}, {a};", ("f32",), "f32", np.sqrt),
    ("fma.rn.f32 {d}, {a}, {b}, {c};", ("f32",) * 3, "f32", fused),
    ("min.f32 {d}, {a}, {b};", ("f32", "f32"), "f32", np.fmin),
    ("max.f64 {d}, {a}, {b};", ("f64", "f64"), "f64", np.fmax),
    ("neg.f32 {d}, {a};", ("f32",), "f32", np.negative),
    ("add.sat.f32 {d}, {a}, {b};", ("f32", "f32"), "f32",
     lambda a, b: np.nan_to_num(np.clip(a + b, 0, 1), nan=0.0)),
    ("cvt.rzi.s32.f32 {d}, {a};", ("f32",), "s32",
     lambda a: clamp_to_integer(a, -(2**31), 2**31 - 1)),
    ("cvt.rni.u32.f32 {d}, {a};", ("f32",), "u32",
     lambda a: clamp_to_integer(np.rint(a), 0, 2**32 - 1)),
    ("cvt.rn.f32.s64 {d}, {a};", ("s64",), "f32", lambda a: a.astype(np.float32)),
    ("cvt.rn.f32.f64 {d}, {a};", ("f64",), "f32", lambda a: a.astype(np.float32)),
    ("cvt.f32.f16 {d}, {a};", ("b16",), "f32", lambda a: a.view(np.float16).astype(np.float32)),
    ("cvt.rn.f16.f32 {d}, {a};", ("f32",), "b16",
     lambda a: a.astype(np.float16).view(np.uint16)),
    ("cvt.rni.f32.f32 {d}, {a};", ("f32",), "f32", np.rint),
    ("add.f16 {d}, {a}, {b};", ("b16", "b16"), "b16",
     lambda a, b: (a.view(np.float16) + b.view(np.float16)).view(np.uint16)),
    ("mul.f16 {d}, {a}, {b};", ("b16", "b16"), "b16",
     lambda a, b: (a.view(np.float16) * b.view(np.float16)).view(np.uint16)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "inputs", "kind", "oracle"),
    FLOAT_CASES,
    ids=[case[0].split()[0] for case in FLOAT_CASES],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_ptx_float_instruction_equals_numpy(soft, text, inputs, kind, oracle):
    arrays = [values_of(name) for name in inputs]
    if inputs[0] == "b16":
        arrays = [
            (RNG.standard_normal(COUNT) * 4).astype(np.float16).view(np.uint16) for _ in inputs
        ]
    got = run_elementwise(soft, elementwise(text, inputs, kind), arrays, kind)
    if oracle is None:
        exact = arrays[0].astype(np.float64) * arrays[1]
        nearest = exact.astype(np.float32)
        toward_zero = np.nextafter(nearest, np.float32(0))
        wanted = np.where(np.abs(nearest.astype(np.float64)) > np.abs(exact), toward_zero, nearest)
        # An overflow is truncated to the largest value.
        overflow = np.isfinite(exact) & np.isinf(nearest)
        limit = np.copysign(np.finfo(np.float32).max, nearest)
        wanted = np.where(overflow, limit, wanted)
    else:
        wanted = np.asarray(oracle(*arrays))
    if DTYPES[kind] in (np.float32, np.float64):
        np.testing.assert_array_equal(got, wanted.astype(DTYPES[kind]))
    else:
        np.testing.assert_array_equal(got, wrap(wanted, kind))


def run_body(soft, body: str, arrays, out: np.ndarray, block=32, grid=1, shared=0, **options):
    """Run a kernel body whose parameters are the arrays followed by the output array."""
    text = module(body, len(arrays) + 1, options.get("declarations", ""))
    loaded = soft.cuModuleLoadData(text.encode() + b"\0")
    function = soft.cuModuleGetFunction(loaded, b"k")
    pointer = soft.put(out)
    soft.run(function, grid, block, *(soft.put(array) for array in arrays), pointer, shared=shared)
    soft.cuModuleUnload(loaded)
    return soft.get(pointer, out.shape, out.dtype)


STORE = "mad.wide.u32 %rd9, %r0, 4, %rd{};\nst.global.u32 [%rd9], {};"


def test_ptx_kernel_has_48_kib_of_static_and_dynamic_shared_memory(soft):
    """cuFuncSetAttribute raises the limit of dynamic shared memory."""
    body = ".shared .align 4 .b8 tile[16384];  mov.u32 %r5, tile;  ld.shared.u32 %r6, [%r5];"
    loaded = soft.cuModuleLoadData(module(body, 1, "").encode() + b"\0")
    function = soft.cuModuleGetFunction(loaded, b"k")
    attribute = soft.d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    pointer = soft.ints(0)
    assert soft.cuFuncGetAttribute(attribute, function) == 32768
    soft.run(function, 1, 1, pointer, shared=32768)
    assert code(soft.try_launch(function, 1, 1, pointer, shared=32769)) == "INVALID_VALUE"
    soft.cuFuncSetAttribute(function, attribute, 232448 - 16384)
    soft.run(function, 1, 1, pointer, shared=100_000)
    too_large = soft.d.cuFuncSetAttribute(function, attribute, 232448 - 16383)
    assert code(too_large) == "INVALID_VALUE"


def test_ptx_divergent_branches_reconverge(soft):
    body = """
        mov.u32 %r5, 0;  mov.u32 %r6, 0;
    LOOP:
        setp.ge.u32 %p1, %r6, %r0;  @%p1 bra DONE;
        add.u32 %r5, %r5, %r6;  add.u32 %r6, %r6, 1;  bra LOOP;
    DONE:
        activemask.b32 %r7;  popc.b32 %r7, %r7;  mad.lo.u32 %r5, %r7, 1000, %r5;
    """ + STORE.format(0, "%r5")
    got = run_body(soft, body, [], np.zeros(32, np.uint32))
    lane = np.arange(32)
    np.testing.assert_array_equal(got, 32000 + lane * (lane - 1) // 2)


EXITS = """
    setp.ge.u32 %p1, %r0, 16;
    @%p1 bra AWAY;
    bar.warp.sync -1;
    shfl.sync.bfly.b32 %r5, %r0, 1, 31, 0xffff;
    {store}
    bra.uni DONE;
AWAY:
    mov.u32 %r6, 0;
LOOP:
    add.u32 %r6, %r6, 1;  setp.lt.u32 %p2, %r6, {steps};  @%p2 bra LOOP;
DONE:
    ret;
"""


@pytest.mark.parametrize("steps", [1, 20000], ids=["exit-first", "exit-later"])
@pytest.mark.parametrize("seed", ["", "1", "2"])
def test_ptx_warp_operation_does_not_wait_for_lanes_that_exit(steps, seed):
    """Lanes may exit before or after the remaining lanes reach the operation."""
    body = EXITS.format(store=STORE.format(1, "%r5"), steps=steps)
    text = outcome(body, **({"SOFTCUDA_PTX_SEED": seed} if seed else {}))
    assert text.startswith("SUCCESS"), text
    values = json.loads(text.splitlines()[-1])
    assert values == [lane ^ 1 for lane in range(16)] + [0] * 48


def test_ptx_shuffles_and_votes(soft):
    body = """
        mul.lo.u32 %r5, %r0, 3;
        shfl.sync.bfly.b32 %r6, %r5, 5, 31, -1;
        shfl.sync.up.b32 %r7|%p1, %r5, 2, 0, -1;
        shfl.sync.down.b32 %r8, %r5, 4, 0x181f, -1;
        and.b32 %r9, %r0, 1;  setp.eq.u32 %p2, %r9, 1;
        vote.sync.ballot.b32 %r10, %p2, -1;
        shr.u32 %r11, %r0, 3;
        match.any.sync.b32 %r12, %r11, -1;
        redux.sync.add.u32 %r13, %r0, -1;
        add.u32 %r6, %r6, %r7;  add.u32 %r6, %r6, %r8;  add.u32 %r6, %r6, %r10;
        add.u32 %r6, %r6, %r12;  add.u32 %r6, %r6, %r13;
        @%p1 add.u32 %r6, %r6, 7;
    """ + STORE.format(0, "%r6")
    got = run_body(soft, body, [], np.zeros(32, np.uint32))
    lane = np.arange(32)
    up = np.where(lane >= 2, lane - 2, lane) * 3
    down = np.where(lane % 8 + 4 < 8, lane + 4, lane) * 3
    match = (255 << lane // 8 * 8).astype(np.int64)
    wanted = (lane ^ 5) * 3 + up + down + 0xAAAAAAAA + match + 496 + 7 * (lane >= 2)
    np.testing.assert_array_equal(got, (wanted % 2**32).astype(np.uint32))


def test_ptx_barrier_reduction_and_named_barriers(soft):
    body = """
        setp.lt.u32 %p1, %r0, 40;
        barrier.cta.red.popc.aligned.u32 %r5, 0, %p1;
        bar.red.or.pred %p2, 0, %p1;
        setp.ge.u32 %p3, %r0, 64;
        @%p3 bra CONSUME;
        bar.arrive 1, 96;
        bra DONE;
    CONSUME:
        bar.sync 1, 96;
    DONE:
        selp.u32 %r6, 100, 0, %p2;  add.u32 %r5, %r5, %r6;
    """ + STORE.format(0, "%r5")
    got = run_body(soft, body, [], np.zeros(96, np.uint32), block=96)
    np.testing.assert_array_equal(got, np.full(96, 140))


def test_ptx_atomics_of_all_lanes(soft):
    body = """
        atom.global.add.u32 %r5, [%rd0], 1;
        red.global.max.s32 [%rd0+4], %r0;
        atom.global.inc.u32 %r6, [%rd0+8], 9;
        cvt.rn.f32.u32 %f1, %r0;  red.global.add.f32 [%rd0+12], %f1;
        atom.global.cas.b32 %r7, [%rd0+16], 0, %r0;
    """
    got = run_body(soft, body, [], np.zeros(5, np.uint32), block=64)
    assert got[:3].tolist() == [64, 63, 4] and got[3:4].view(np.float32)[0] == 2016
    assert 0 <= got[4] < 64


def test_ptx_device_functions_local_arrays_and_indirect_branches(soft):
    declarations = """
    .func (.param .b32 out) twice(.param .b32 in)
    { .reg .b32 %q<4>; ld.param.b32 %q1, [in]; setp.eq.u32 %odd, %q1, 3; @%odd bra LAST;
      add.u32 %q1, %q1, %q1; LAST: st.param.b32 [out], %q1; ret; }
    """.replace("{ .reg", "{ .reg .pred %odd; .reg")
    body = """
        .local .align 4 .b8 stack[16];
        TARGETS: .branchtargets ZERO, ONE, TWO;
        mov.u64 %rd5, stack;
        and.b32 %r5, %r0, 3;  mul.wide.u32 %rd6, %r5, 4;  add.u64 %rd6, %rd5, %rd6;
        st.local.u32 [%rd6], %r0;  ld.local.u32 %r6, [%rd6];
        { .param .b32 a; .param .b32 b; st.param.b32 [a], %r6; call.uni (b), twice, (a);
          ld.param.b32 %r7, [b]; }
        rem.u32 %r8, %r0, 3;
        brx.idx %r8, TARGETS;
    ZERO: add.u32 %r7, %r7, 1000; bra END;
    ONE: add.u32 %r7, %r7, 2000; bra END;
    TWO: add.u32 %r7, %r7, 3000;
    END:
    """ + STORE.format(0, "%r7")
    got = run_body(soft, body, [], np.zeros(32, np.uint32), declarations=declarations)
    lane = np.arange(32)
    np.testing.assert_array_equal(got, np.where(lane == 3, 3, 2 * lane) + (lane % 3 + 1) * 1000)


def test_ptx_module_variables_and_printf(soft, capfd):
    declarations = """
    .const .align 4 .b32 table[4] = {5, 6, 7, 8};
    .global .align 4 .u32 counter = 40;
    .global .align 1 .b8 text[8] = {37, 100, 32, 37, 115, 10, 0};
    .global .align 1 .b8 name[4] = {97, 98, 0};
    .extern .func (.param .b32 r) vprintf (.param .b64 f, .param .b64 v);
    """
    body = """
        .local .align 8 .b8 depot[16];
        ld.const.b32 %r5, [table+8];
        atom.global.add.u32 %r6, [counter], 2;
        add.u32 %r5, %r5, %r6;
        mov.u64 %rd5, depot;  cvta.local.u64 %rd6, %rd5;
        st.local.u32 [%rd5], %r5;  mov.u64 %rd7, name;  cvta.global.u64 %rd7, %rd7;
        st.local.u64 [%rd5+8], %rd7;  mov.u64 %rd8, text;
        { .param .b64 a; .param .b64 b; .param .b32 c; st.param.b64 [a], %rd8;
          st.param.b64 [b], %rd6; call.uni (c), vprintf, (a, b); }
    """ + STORE.format(0, "%r5")
    got = run_body(soft, body, [], np.zeros(1, np.uint32), block=1, declarations=declarations)
    assert got[0] == 47
    assert "47 ab\n" in capfd.readouterr().out


def bfloat16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint32)


def test_ptx_mma_equals_matrix_product(soft):
    a = bfloat16(RNG.standard_normal((16, 16)))
    b = bfloat16(RNG.standard_normal((16, 8)))
    c = RNG.standard_normal((16, 8)).astype(np.float32)
    lane = np.arange(32)
    group, t = lane // 4, lane % 4
    pairs = []
    for row, column in ((0, 0), (8, 0), (0, 8), (8, 8)):
        low = a[group + row, 2 * t + column]
        high = a[group + row, 2 * t + column + 1]
        pairs.append(low | high << 16)
    for row in (0, 8):
        pairs.append(b[2 * t + row, group] | b[2 * t + row + 1, group] << 16)
    sums = [c[group + 8 * (i // 2), 2 * t + i % 2].view(np.uint32) for i in range(4)]
    data = np.stack([*pairs, *sums], 1).astype(np.uint32)
    loads = "\n".join(f"ld.global.b32 %r{10 + i}, [%rd4+{4 * i}];" for i in range(10))
    body = f"""
        mad.wide.u32 %rd4, %r0, 40, %rd0;  mad.wide.u32 %rd5, %r0, 16, %rd1;
        {loads}
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{%r20, %r21, %r22, %r23}},
            {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r16, %r17, %r18, %r19}};
        st.global.v4.b32 [%rd5], {{%r20, %r21, %r22, %r23}};
    """
    got = run_body(soft, body, [data], np.zeros((32, 4), np.float32))
    result = np.zeros((16, 8), np.float32)
    for i in range(4):
        result[group + 8 * (i // 2), 2 * t + i % 2] = got[:, i]
    wide = [(x << 16).astype(np.uint32).view(np.float32).astype(np.float64) for x in (a, b)]
    np.testing.assert_allclose(result, wide[0] @ wide[1] + c, rtol=1e-5, atol=1e-5)


COPY = """
    .shared .align 16 .b8 tile[512];
    mov.u32 %r5, tile;  mad.lo.u32 %r6, %r0, 16, %r5;  mad.wide.u32 %rd4, %r0, 16, %rd0;
    cp.async.cg.shared.global [%r6], [%rd4], 16;
    cp.async.commit_group;
    {wait}
    {barrier}
    xor.b32 %r7, %r0, {other};  mad.lo.u32 %r7, %r7, 16, %r5;  ld.shared.u32 %r8, [%r7+4];
"""


def test_ptx_cp_async_copies_data(soft):
    data = np.arange(128, dtype=np.uint32)
    body = COPY.format(wait="cp.async.wait_group 0;", barrier="bar.sync 0;", other=1)
    got = run_body(soft, body + STORE.format(1, "%r8"), [data], np.zeros(32, np.uint32))
    np.testing.assert_array_equal(got, (np.arange(32) ^ 1) * 4 + 1)


# ---- faults, races and the adversarial setting ---------------------------------------------------

RUN = """
text = {text!r}
if {stack}: s.cuCtxSetLimit(d.CUlimit.CU_LIMIT_STACK_SIZE, {stack})
k = s.cuModuleGetFunction(s.cuModuleLoadData(text.encode() + b"\\0"), b"k")
a = s.put(np.arange(1024, dtype=np.uint32))
out = s.put(np.zeros(64, np.uint32))
s.launch(k, {grid}, {block}, a, out)
result = code(d.cuCtxSynchronize())
from graft.cudagraph.driver import softstats
message = softstats.error_detail(True)
print(result, message)
if result == "SUCCESS": print(s.get(out, 64, np.uint32).tolist())
"""


def outcome(
    body: str, block: int = 32, grid: int = 1, declarations: str = "", stack: int = 0, **env: str
) -> str:
    """Run a kernel in a child process and return its error code and the text of its fault.

    A `stack` other than 0 is the limit CU_LIMIT_STACK_SIZE.
    """
    text = module(body, 2, declarations)
    done = util.run_child(RUN.format(text=text, grid=grid, block=block, stack=stack), **env)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


FAULTS = [
    ("ld.global.u32 %r5, [%rd0+4096];", "illegal read", "0 bytes past the end of"),
    ("st.global.u32 [%rd1+256], %r0;", "illegal write", "parameter 1"),
    ("ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd0+4];", "misaligned access", "multiple of 16"),
    ("mov.u32 %r5, 4096; ld.shared.u32 %r6, [%r5];", "shared address", "outside of"),
    ("mov.u64 %rd5, 0; ld.global.u32 %r5, [%rd5];", "illegal read", "a null pointer"),
    ("setp.lt.u32 %p1, %r0, 16; @%p1 bra L; shfl.sync.bfly.b32 %r5, %r0, 1, 31, -1; L: bar.sync 0;",
     "divergent warp-synchronous operation", "bar.sync"),
    ("setp.lt.u32 %p1, %r0, 32; @%p1 bra L; bar.sync 1; L: bar.sync 0;", "divergent barrier",
     "barrier 1"),
    ("trap;", "trap", "PTX line"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "what", "detail"), FAULTS, ids=[case[1] for case in FAULTS])
def test_ptx_fault_names_thread_and_line(body, what, detail):
    text = outcome(body, block=64)
    assert what in text and detail in text
    assert "kernel 'k' block (0,0,0)" in text and "PTX line" in text


EXCHANGE = """
    .shared .align 4 .b8 words[512];
    mov.u32 %r5, words;  mad.lo.u32 %r6, %r0, 4, %r5;  st.shared.u32 [%r6], %r0;
    {barrier}
    xor.b32 %r7, %r0, 32;  mad.lo.u32 %r7, %r7, 4, %r5;  ld.shared.u32 %r8, [%r7];
""" + STORE.format(1, "%r8")


def test_ptx_racecheck_reports_both_instructions():
    text = outcome(EXCHANGE.format(barrier=""), block=64, SOFTCUDA_RACECHECK="1")
    assert "race in shared memory" in text
    assert "ld.shared.u32" in text and "st.shared.u32" in text
    text = outcome(EXCHANGE.format(barrier="bar.sync 0;"), block=64, SOFTCUDA_RACECHECK="1")
    assert text.startswith("SUCCESS")


def test_ptx_seed_reveals_missing_barrier_and_missing_wait_group():
    good = str([i ^ 32 for i in range(64)])
    seeds = ["1", "2"]
    results = [
        outcome(EXCHANGE.format(barrier="bar.sync 0;"), 64, SOFTCUDA_PTX_SEED=seed)
        for seed in seeds
    ]
    assert all(good in text for text in results)
    results = [outcome(EXCHANGE.format(barrier=""), 64, SOFTCUDA_PTX_SEED=seed) for seed in seeds]
    assert any(good not in text for text in results)
    body = COPY.format(wait="", barrier="bar.sync 0;", other=1) + STORE.format(1, "%r8")
    assert "4294967295" in outcome(body, 32, SOFTCUDA_PTX_SEED="1")


# ---- refusals -----------------------------------------------------------------------------------

REFUSED = [
    ("wgmma.fence.sync.aligned;", "NOT_SUPPORTED", "wgmma.fence"),
    ("cp.async.bulk.commit_group;", "NOT_SUPPORTED", "cp.async.bulk"),
    ("tex.1d.v4.f32.s32 {%r1,%r2,%r3,%r4}, [t, {%r1}];", "", "line"),
    ("add.u32 %r99, %r1, %r2;", "INVALID_PTX", "%r99"),
    ("add.u32 %rd1, %r1, %r2;", "INVALID_PTX", "wrong size"),
    ("bra NOWHERE;", "INVALID_PTX", "NOWHERE"),
    ("add.u32 %r1, %r1, %r2", "INVALID_PTX", "is expected"),
    ("add.strange.u32 %r1, %r1, %r2;", "NOT_SUPPORTED", "strange"),
]


@pytest.mark.parametrize(
    ("body", "error", "words"), REFUSED, ids=[c[0].split()[0] for c in REFUSED]
)
def test_ptx_module_is_refused_by_instruction_and_line(soft, body, error, words):
    options = [
        soft.d.CUjit_option.CU_JIT_ERROR_LOG_BUFFER,
        soft.d.CUjit_option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
    ]
    log = bytearray(400)
    text = module(body).encode() + b"\0"
    result = soft.d.cuModuleLoadDataEx(text, 2, options, [log, 400])
    assert error in result[0].name and result[0].name != "CUDA_SUCCESS"
    message = bytes(log).rstrip(b"\0").decode()
    assert words in message and "PTX line" in message


def test_ptx_mutated_modules_are_accepted_or_refused(soft):
    body = EXCHANGE.format(barrier="bar.sync 0;") + "\n@%p1 bra END;\nEND:\n"
    text = module(body, 2, ".global .align 4 .b32 t[2] = {1, 2};")
    random_numbers = random.Random(4)
    words = ["{", "}", ";", "[", "%r", "0x", "ld.", ".b32", ",", "99999999999", "(", '"', "/*", "<"]
    outcomes = set()
    for _ in range(400):
        mutated = text
        for _ in range(random_numbers.randrange(1, 4)):
            at = random_numbers.randrange(len(HEADER), len(mutated))
            kind = random_numbers.randrange(3)
            if kind == 0:
                mutated = mutated[:at]
            elif kind == 1:
                mutated = mutated[:at] + random_numbers.choice(words) + mutated[at:]
            else:
                mutated = mutated[:at] + mutated[at + random_numbers.randrange(1, 30) :]
            if len(mutated) <= len(HEADER):
                mutated = text
        result = soft.d.cuModuleLoadData(mutated.encode() + b"\0")
        outcomes.add(result[0].name)
        if int(result[0]) == 0:
            soft.cuModuleUnload(result[1])
    assert outcomes <= {"CUDA_SUCCESS", "CUDA_ERROR_INVALID_PTX", "CUDA_ERROR_NOT_SUPPORTED"}
    assert len(outcomes) >= 2


def test_ptx_huge_declarations_are_refused(soft):
    declarations = (".local .align 4 .b8 x[999999999];", ".shared .align 4 .b8 x[999999];")
    for declaration in declarations:
        body = f"{declaration} mov.u64 %rd5, x; ld.local.u32 %r5, [%rd5];"
        result = soft.d.cuModuleLoadData(module(body).encode() + b"\0")
        assert result[0].name == "CUDA_ERROR_INVALID_PTX"


# ---- PTX of NVRTC -------------------------------------------------------------------------------

SOURCE = """
extern "C" __global__ void dot(const float* x, const float* y, float* out, int n) {
  __shared__ float sums[4];
  float sum = 0.0f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i] * y[i];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) *out = sums[0] + sums[1] + sums[2] + sums[3];
}
"""


@pytest.mark.skipif(nvrtc.missing_compiler() != "", reason="NVRTC is not installed")
@pytest.mark.parametrize("architecture", ["80", "90", "100"])
def test_ptx_of_nvrtc_computes_dot_product(soft, tmp_path, monkeypatch, architecture):
    monkeypatch.setenv("GRAFT_PTX_ARCH", architecture)
    target = f"compute_{ptx.architecture()}"
    text = nvrtc.compile_nvrtc(SOURCE, "dot.cu", [], target, tmp_path)
    assert f"sm_{architecture}".encode() in text
    assert nvrtc.compile_nvrtc(SOURCE, "dot.cu", [], target, tmp_path) == text
    loaded = soft.cuModuleLoadData(text)
    x, y = RNG.standard_normal((2, 1000)).astype(np.float32)
    out = soft.put(np.zeros(1, np.float32))
    dot = soft.cuModuleGetFunction(loaded, b"dot")
    soft.run(dot, 1, 128, soft.put(x), soft.put(y), out, np.int32(1000))
    np.testing.assert_allclose(soft.get(out, 1, np.float32), [x @ y], rtol=1e-4)
    soft.cuModuleUnload(loaded)


def test_code_of_soft_device_is_validated(monkeypatch):
    monkeypatch.setenv("GRAFT_CODE", "sass")
    with pytest.raises(DeviceError, match="sass"):
        ptx.soft_device_runs_ptx()
    monkeypatch.setenv("GRAFT_PTX_ARCH", "hopper")
    with pytest.raises(DeviceError, match="hopper"):
        ptx.architecture()
