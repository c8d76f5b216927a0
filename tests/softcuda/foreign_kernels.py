"""Kernels that numba-cuda and Triton compile to PTX, for `test_ptx_foreign.py`.

Usage: ``python foreign_kernels.py numba|triton``. Prints a JSON object with the PTX text, the name
of the entry and the launch sizes of each kernel. The interpreter need not have graft. The outputs
are stored in ``foreign_kernels/numba.json`` and ``foreign_kernels/triton.json``.
"""

# The compilers read names and types from the kernels, which therefore have no annotations.
# mypy: ignore-errors

from __future__ import annotations

import json
import re
import sys


def entry_of(text: str) -> str:
    return re.search(r"\.entry\s+(\w+)", text)[1]


def numba_kernels() -> dict[str, dict]:
    from numba import cuda, float32, int32
    from numba.cuda import compile_ptx

    vector, matrix, words = float32[::1], float32[:, ::1], int32[::1]

    def block_sums(x, out):
        partial = cuda.shared.array(4, float32)
        thread = cuda.threadIdx.x
        value = x[cuda.grid(1)] if cuda.grid(1) < x.size else float32(0)
        for offset in (16, 8, 4, 2, 1):
            value += cuda.shfl_down_sync(0xFFFFFFFF, value, offset)
        if thread % 32 == 0:
            partial[thread // 32] = value
        cuda.syncthreads()
        if thread == 0:
            out[cuda.blockIdx.x] = partial[0] + partial[1] + partial[2] + partial[3]

    def product(a, b, out):
        left = cuda.shared.array((8, 8), float32)
        right = cuda.shared.array((8, 8), float32)
        row, column = cuda.grid(2)
        i, j = cuda.threadIdx.x, cuda.threadIdx.y
        total = float32(0)
        for k in range(0, a.shape[1], 8):
            left[i, j] = a[row, k + j]
            right[i, j] = b[k + i, column]
            cuda.syncthreads()
            for m in range(8):
                total += left[i, m] * right[m, j]
            cuda.syncthreads()
        out[row, column] = total

    def histogram(values, counts):
        i = cuda.grid(1)
        if i < values.size:
            cuda.atomic.add(counts, values[i] % counts.size, 1)

    def scan(x, out):
        both = cuda.shared.array((2, 128), float32)
        i = cuda.threadIdx.x
        both[0, i] = x[i]
        cuda.syncthreads()
        step, side = 1, 0
        while step < 128:
            value = both[side, i]
            if i >= step:
                value += both[side, i - step]
            both[1 - side, i] = value
            cuda.syncthreads()
            side = 1 - side
            step *= 2
        out[i] = both[side, i]

    signatures = {
        block_sums: (vector, vector),
        product: (matrix, matrix, matrix),
        histogram: (words, words),
        scan: (vector, vector),
    }
    found = {}
    for kernel, signature in signatures.items():
        text, _ = compile_ptx(kernel, signature, cc=(8, 0))
        found[kernel.__name__] = {"ptx": text, "entry": entry_of(text)}
    return found


def triton_kernels() -> dict[str, dict]:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    @triton.jit
    def add(x, y, out, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)

    @triton.jit
    def softmax(x, out, n, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        row = tl.program_id(0) * n
        values = tl.load(x + row + i, mask=i < n, other=float("-inf"))
        weights = tl.exp(values - tl.max(values, 0))
        tl.store(out + row + i, weights / tl.sum(weights, 0), mask=i < n)

    @triton.jit
    def scan(x, out, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(out + i, tl.cumsum(tl.load(x + i), 0))

    @triton.jit
    def histogram(values, counts, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.atomic_add(counts + tl.load(values + i, mask=i < n, other=0) % 16, 1, mask=i < n)

    @triton.jit
    def product(a, b, out, inner, BLOCK: tl.constexpr, STEP: tl.constexpr):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        step = tl.arange(0, STEP)
        total = tl.zeros((BLOCK, BLOCK), tl.float32)
        for k in range(0, inner, STEP):
            left = tl.load(a + row[:, None] * inner + k + step[None, :])
            right = tl.load(b + (k + step)[:, None] * 64 + column[None, :])
            total = tl.dot(left, right, total)
        tl.store(out + row[:, None] * 64 + column[None, :], total)

    block = {"BLOCK": 256}
    tile = {"BLOCK": 32, "STEP": 32}
    pointers = {"x": "*fp32", "y": "*fp32", "out": "*fp32"}
    sources = {
        "add": (add, {**pointers, "n": "i32"}, block, 80),
        "softmax": (softmax, {"x": "*fp32", "out": "*fp32", "n": "i32"}, block, 90),
        "scan": (scan, {"x": "*fp32", "out": "*fp32"}, block, 90),
        "histogram": (histogram, {"values": "*i32", "counts": "*i32", "n": "i32"}, block, 80),
        "product_80": (
            product,
            {"a": "*fp16", "b": "*fp16", "out": "*fp32", "inner": "i32"},
            tile,
            80,
        ),
        "product_90": (
            product,
            {"a": "*fp16", "b": "*fp16", "out": "*fp32", "inner": "i32"},
            {"BLOCK": 64, "STEP": 32},
            90,
        ),
    }
    found = {}
    for name, (kernel, signature, constants, capability) in sources.items():
        aligned = {}
        for i, kind in enumerate(signature.values()):
            if kind.startswith("*") or name.startswith("product"):
                aligned[(i,)] = [["tt.divisibility", 16]]
        types = {**signature, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        text = compiled.asm["ptx"]
        threads = 32 * compiled.metadata.num_warps
        found[name] = {
            "ptx": text,
            "entry": entry_of(text),
            "shared": compiled.metadata.shared,
            "threads": threads,
        }
    return found


def without_paths(text: str) -> str:
    """Return PTX without debug sections, and without the folders of source files."""
    code = re.split(r"\n\s*\.section\s+\.debug", text)[0]
    return re.sub(r'(\.file\s+\d+\s+")[^"]*/', r"\1", code) + "\n"


if __name__ == "__main__":
    kernels = {"numba": numba_kernels, "triton": triton_kernels}[sys.argv[1]]()
    for kernel in kernels.values():
        kernel["ptx"] = without_paths(kernel["ptx"])
    print(json.dumps(kernels, indent=1))
