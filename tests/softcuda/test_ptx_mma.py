"""mma.sync against exact arithmetic with fractions, for each model of accumulation (PTX.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import softcuda_util as util
from ptx_util import module

pytestmark = pytest.mark.ptx


@dataclass(frozen=True)
class Kind:
    """Element type of A and B: PTX name, bits, inner dimension, type of the accumulators."""

    name: str
    bits: int
    inner: int
    sums: str = "f32"


KINDS = {
    kind.name: kind
    for kind in (
        Kind("bf16", 16, 16),
        Kind("f16", 16, 16),
        Kind("tf32", 32, 8),
        Kind("e4m3", 8, 32),
        Kind("s8", 8, 32, "s32"),
    )
}
LANE = np.arange(32)
GROUP, THREAD = LANE // 4, LANE % 4


def elements(kind: Kind, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Return random bits of elements, whose magnitudes differ by up to 2^12."""
    if kind.name == "s8":
        return rng.integers(0, 256, shape).astype(np.uint32)
    if kind.name == "e4m3":
        bits = rng.integers(0, 127, shape) | rng.integers(0, 2, shape) << 7
        return bits.astype(np.uint32)
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 7, shape)
    if kind.name == "f16":
        return values.astype(np.float16).view(np.uint16).astype(np.uint32)
    bits = values.astype(np.float32).view(np.uint32)
    # Truncated to 8 (bf16) or 11 (tf32) significant bits.
    return bits >> 16 if kind.name == "bf16" else bits & 0xFFFFE000


def value(kind: Kind, bits: int) -> Fraction:
    """Return the number that the bits of an element represent."""
    if kind.name == "s8":
        return Fraction(bits - 256 if bits > 127 else bits)
    if kind.name == "f16":
        return Fraction(float(np.uint16(bits).view(np.float16)))
    if kind.name == "e4m3":
        exponent, mantissa = bits >> 3 & 15, bits & 7
        magnitude = Fraction(8 * (exponent > 0) + mantissa, 8) * Fraction(2) ** (
            max(exponent, 1) - 7
        )
        return -magnitude if bits & 128 else magnitude
    word = np.uint32(int(bits) << 16 if kind.name == "bf16" else bits)
    return Fraction(float(word.view(np.float32)))


def exponent_of(x: Fraction) -> int:
    """Return the exponent of the highest bit of a number that is not zero."""
    x = abs(x)
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


def truncated(x: Fraction, last: int) -> Fraction:
    """Truncate a number to a multiple of 2^last, towards zero."""
    unit = Fraction(2) ** last
    count = abs(x) // unit
    return count * unit if x >= 0 else -count * unit


def truncated_float(x: Fraction) -> Fraction:
    return truncated(x, exponent_of(x) - 23) if x != 0 else x


def rounded_float(x: Fraction) -> Fraction:
    """Round a number to a normal float32, to nearest even."""
    if x == 0:
        return x
    unit = Fraction(2) ** (exponent_of(x) - 23)
    return round(x / unit) * unit


def sequential(products: list[Fraction], start: Fraction) -> Fraction:
    for product in products:
        start = rounded_float(start + product)
    return start


def exact(products: list[Fraction], start: Fraction) -> Fraction:
    return rounded_float(start + sum(products))


def hardware(products: list[Fraction], start: Fraction, step: int, bits: int) -> Fraction:
    for first in range(0, len(products), step):
        terms = [start, *products[first : first + step]]
        top = max(exponent_of(x) for x in terms if x != 0)
        start = truncated_float(sum(truncated(x, top - bits) for x in terms))
    return start


def registers(kind: Kind, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return the registers of all lanes: the fragments of A, B and C (PTX ISA, mma.m16n8k*)."""
    per = 32 // kind.bits
    columns = []
    for r in range(kind.inner // (2 * per)):
        word = np.zeros(32, np.uint32)
        for e in range(per):
            column = THREAD * per + r // 2 * 4 * per + e
            word |= a[GROUP + 8 * (r % 2), column] << np.uint32(kind.bits * e % 32)
        columns.append(word)
    for r in range(kind.inner // (4 * per)):
        word = np.zeros(32, np.uint32)
        for e in range(per):
            word |= b[THREAD * per + r * 4 * per + e, GROUP] << np.uint32(kind.bits * e % 32)
        columns.append(word)
    columns += [c[GROUP + 8 * (r // 2), 2 * THREAD + r % 2].view(np.uint32) for r in range(4)]
    return np.stack(columns, 1)


def kernel(kind: Kind, target: int, modifier: str = "") -> str:
    """Return a module whose kernel loads the fragments of a lane and stores those of D."""
    per = 32 // kind.bits
    sizes = (kind.inner // (2 * per), kind.inner // (4 * per), 4)
    count = sum(sizes)
    loads = "\n".join(f"ld.global.b32 %r{10 + i}, [%rd4+{4 * i}];" for i in range(count))
    names = [f"%r{10 + i}" for i in range(count)]
    fragments = []
    for size in sizes:
        fragments.append("{" + ", ".join(names[:size]) + "}")
        names = names[size:]
    types = f"{kind.sums}.{kind.name}.{kind.name}.{kind.sums}"
    body = f"""
        mad.wide.u32 %rd4, %r0, {4 * count}, %rd0;  mad.wide.u32 %rd5, %r0, 16, %rd1;
        {loads}
        mma.sync.aligned.m16n8k{kind.inner}.row.col{modifier}.{types} {{%r40, %r41, %r42, %r43}},
            {", ".join(fragments)};
        st.global.v4.b32 [%rd5], {{%r40, %r41, %r42, %r43}};
    """
    return module(body, 2).replace("sm_90", f"sm_{target}")


RUN = """
import json
for text, words in {cases!r}:
    k = s.cuModuleGetFunction(s.cuModuleLoadData(text.encode() + b"\\0"), b"k")
    out = s.put(np.zeros(128, np.uint32))
    s.run(k, 1, 32, s.put(np.array(words, np.uint32)), out)
    print(json.dumps(s.get(out, 128, np.uint32).tolist()))
"""


def run_cases(cases: list[tuple[str, list[int]]], model: str) -> list[np.ndarray]:
    """Run kernels in a child process with a model and return their results as matrices of bits."""
    done = util.run_child(RUN.format(cases=cases), SOFTCUDA_PTX_MMA=model)
    assert done.returncode == 0, done.stderr
    results = []
    for line in done.stdout.splitlines():
        lanes = np.array(json.loads(line), np.uint32).reshape(32, 4)
        matrix = np.zeros((16, 8), np.uint32)
        for r in range(4):
            matrix[GROUP + 8 * (r // 2), 2 * THREAD + r % 2] = lanes[:, r]
        results.append(matrix)
    return results


def check(case: tuple[Kind, int], matrices, got: np.ndarray, model) -> int:
    """Compare rows of a result with a model. Return how many elements differ from `exact`."""
    kind, _target = case
    a, b, c = matrices
    left = [[value(kind, int(x)) for x in row] for row in a]
    right = [[value(kind, int(x)) for x in row] for row in b.T]
    different = 0
    for i in (0, 6, 9, 15):
        for j in range(8):
            products = [x * y for x, y in zip(left[i], right[j], strict=True)]
            start = Fraction(float(c[i, j]))
            wanted = model(products, start)
            assert got.view(np.float32)[i, j] == float(wanted), (i, j)
            different += wanted != exact(products, start)
    return different


FLOAT_KINDS = [kind for kind in KINDS.values() if kind.name != "s8"]
#: Bits of operands whose products are added at once, and fraction bits of the sum, by target.
WIDTHS = {80: (128, 24), 90: (256, 25), 100: (256, 25)}


def model_of(name: str, kind: Kind, target: int):
    if name == "hardware":
        width, bits = WIDTHS[target]
        if kind.bits == 8 and 89 <= target < 100:
            bits = 13
        return lambda products, start: hardware(products, start, width // kind.bits, bits)
    return {"sequential": sequential, "exact": exact}[name]


@pytest.mark.parametrize("name", ["sequential", "exact", "hardware"])
def test_mma_accumulates_as_model_states(name):
    rng = np.random.default_rng(17)
    cases, texts, inputs = [], [], []
    for kind in FLOAT_KINDS:
        for target in WIDTHS if name == "hardware" else (90,):
            a = elements(kind, (16, kind.inner), rng)
            b = elements(kind, (kind.inner, 8), rng)
            c = (rng.standard_normal((16, 8)) * 64).astype(np.float32)
            cases.append((kind, target))
            inputs.append((a, b, c))
            texts.append((kernel(kind, target), registers(kind, a, b, c).ravel().tolist()))
    results = run_cases(texts, name)
    different = 0
    for case, matrices, got in zip(cases, inputs, results, strict=True):
        different += check(case, matrices, got, model_of(name, *case))
    # The models give different results for these inputs.
    assert (different == 0) == (name == "exact")


@pytest.mark.parametrize("modifier", ["", ".satfinite"])
def test_integer_mma_wraps_or_saturates(modifier):
    kind = KINDS["s8"]
    rng = np.random.default_rng(18)
    a, b = elements(kind, (16, 32), rng), elements(kind, (32, 8), rng)
    c = rng.integers(-(2**31), 2**31, (16, 8)).astype(np.int32)
    c[:8] = rng.choice([2**31 - 1, -(2**31)], (8, 8))
    words = registers(kind, a, b, c).ravel().tolist()
    (got,) = run_cases([(kernel(kind, 90, modifier), words)], "hardware")
    sums = a.astype(np.int8).astype(np.int64) @ b.astype(np.int8).astype(np.int64) + c
    limits = np.iinfo(np.int32)
    wanted = sums.astype(np.int32) if not modifier else np.clip(sums, limits.min, limits.max)
    assert np.any(sums > limits.max) and np.any(sums < limits.min)
    np.testing.assert_array_equal(got.view(np.int32), wanted)


# ---- wmma ----------------------------------------------------------------------------------------

SHAPES = {"m16n16k16": (16, 16, 16), "m32n8k16": (32, 8, 16), "m8n32k16": (8, 32, 16)}


def names(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def wmma_kernel(shape: str, element: str, sums: str, layouts: tuple[str, str, str]) -> str:
    """Return a kernel that multiplies matrices k_0 and k_1, adds k_2 and writes k_3."""
    doubled = 2 if element == "f16" else 1
    bits = {"s8": 8, "tf32": 32}.get(element, 16)
    rows, columns, inner = SHAPES.get(shape, (16, 16, 8))
    count_a = rows * inner * bits // 1024 * doubled
    count_b = columns * inner * bits // 1024 * doubled
    count_c = 4 if sums == "f16" else 8
    row_a, row_b, row_c = layouts
    types = f"{sums}.{sums}" if element == "f16" else f"{sums}.{element}.{element}.{sums}"
    d, a, b = names(10, count_c), names(20, count_a), names(30, count_b)
    return module(f"""
        mov.u32 %r5, {rows if row_c == "col" else columns};
        wmma.load.a.sync.aligned.{row_a}.{shape}.global.{element} {a}, [%rd0];
        wmma.load.b.sync.aligned.{row_b}.{shape}.global.{element} {b}, [%rd1];
        wmma.load.c.sync.aligned.{row_c}.{shape}.global.{sums} {d}, [%rd2], %r5;
        wmma.mma.sync.aligned.{row_a}.{row_b}.{shape}.{types} {d}, {a}, {b}, {d};
        wmma.store.d.sync.aligned.{row_c}.{shape}.global.{sums} [%rd3], {d}, %r5;
    """)


WMMA = [
    ("m16n16k16", "f16", "f32", ("row", "col", "row")),
    ("m16n16k16", "f16", "f16", ("col", "row", "col")),
    ("m32n8k16", "bf16", "f32", ("row", "row", "row")),
    ("m8n32k16", "f16", "f32", ("row", "col", "col")),
    ("m32n8k16", "s8", "s32", ("col", "col", "row")),
    ("m16n16k8", "tf32", "f32", ("row", "col", "row")),
]


@pytest.mark.parametrize("case", WMMA, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_wmma_equals_matrix_product(soft, case):
    shape, element, sums, layouts = case
    m, n, k = SHAPES.get(shape, (16, 16, 8))
    rng = np.random.default_rng(19)
    # Small integers, so that all sums are exact in every model.
    matrices = [rng.integers(-7, 8, size) for size in ((m, k), (k, n), (m, n))]
    store = {
        "f16": lambda x: x.astype(np.float16),
        "f32": lambda x: x.astype(np.float32),
        "tf32": lambda x: x.astype(np.float32),
        "s32": lambda x: x.astype(np.int32),
        "s8": lambda x: x.astype(np.int8),
        "bf16": lambda x: (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
    }
    pointers = []
    for matrix, layout, kind in zip(matrices, layouts, (element, element, sums), strict=True):
        stored = store[kind](matrix if layout == "row" else matrix.T)
        pointers.append(soft.put(np.ascontiguousarray(stored)))
    out_type = store[sums](np.zeros(1)).dtype
    pointers.append(soft.put(np.zeros(m * n, out_type)))
    loaded = soft.cuModuleLoadData(wmma_kernel(*case).encode() + b"\0")
    soft.run(soft.cuModuleGetFunction(loaded, b"k"), 1, 32, *pointers)
    got = soft.get(pointers[3], (m, n) if layouts[2] == "row" else (n, m), out_type)
    soft.cuModuleUnload(loaded)
    wanted = matrices[0] @ matrices[1] + matrices[2]
    np.testing.assert_array_equal(got if layouts[2] == "row" else got.T, wanted)


def test_wmma_of_wrong_size_is_refused(soft):
    text = module("wmma.load.a.sync.aligned.row.m16n16k16.global.bf16 {%r1, %r2}, [%rd0];")
    assert soft.d.cuModuleLoadData(text.encode() + b"\0")[0].name == "CUDA_ERROR_INVALID_PTX"
    text = module("wmma.load.a.sync.aligned.row.m16n16k16.global.f64 {%rd1, %rd2}, [%rd0];")
    assert soft.d.cuModuleLoadData(text.encode() + b"\0")[0].name == "CUDA_ERROR_NOT_SUPPORTED"
