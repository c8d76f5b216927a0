"""Defective, hostile and mutated PTX modules: typed errors and faults, but no crash."""

from __future__ import annotations

import random
import time

import pytest
import softcuda_util as util
from ptx_fuzz import MODULES, mutants
from ptx_util import HEADER, module

pytestmark = pytest.mark.ptx

TYPED = {"CUDA_SUCCESS", "CUDA_ERROR_INVALID_PTX", "CUDA_ERROR_NOT_SUPPORTED"}


def load(soft, text: str) -> str:
    """Load a module, unload it again, and return the name of the result."""
    result = soft.d.cuModuleLoadData(text.encode("latin-1", "replace") + b"\0")
    if int(result[0]) == 0:
        soft.cuModuleUnload(result[1])
    return result[0].name


def test_truncated_ptx_module_is_refused(soft):
    outcomes = set()
    for text in MODULES:
        for end in range(len(HEADER), len(text) - 3, 61):
            outcomes.add(load(soft, text[:end]))
    assert outcomes <= TYPED and "CUDA_ERROR_INVALID_PTX" in outcomes


def test_ptx_module_with_random_bytes_is_refused(soft):
    rng = random.Random(11)
    outcomes = set()
    for i in range(200):
        text = list(MODULES[i % len(MODULES)])
        for _ in range(rng.randrange(1, 30)):
            text[rng.randrange(len(HEADER), len(text))] = chr(rng.randrange(1, 256))
        outcomes.add(load(soft, "".join(text)))
    assert outcomes <= TYPED and "CUDA_ERROR_INVALID_PTX" in outcomes


@pytest.mark.parametrize("sizes", [" x", " 5", " -1", " 99999999999999999999", ""])
@pytest.mark.parametrize("second_line", [".version\n", ".version", ""])
def test_damaged_image_of_linked_modules_is_refused(soft, sizes, second_line):
    header = "// PTX texts linked by the soft device, with their sizes:"
    outcome = load(soft, f"{header}{sizes}\n{second_line}")
    assert outcome in ("CUDA_ERROR_INVALID_PTX", "CUDA_ERROR_INVALID_IMAGE")


def chain(count: int, end: str = "ret;") -> str:
    """Return functions, each of which calls the next one twice."""
    lines = []
    for i in range(count):
        call = f"call f{i + 1}; call f{i + 1};" if i + 1 < count else ""
        lines.append(f".func f{i} () {{ {call} {end} }}")
    return "\n".join(lines)


HUGE = {
    "instructions": lambda: module("add.u32 %r5, %r5, 1;\n" * 80_000),
    "labels": lambda: module("\n".join(f"L{i}: bra L{i};" for i in range(50_000))),
    "blocks": lambda: module("{" * 20_000 + "}" * 20_000),
    "registers": lambda: module(".reg .b64 %x<999999999>; add.u64 %x99999999, %x1, %x2;"),
    "used registers": lambda: module(
        ".reg .b64 %x<100000>;" + "\n".join(f"mov.u64 %x{i}, {i};" for i in range(90_000))
    ),
    "constants": lambda: module("\n".join(f"mov.u64 %rd5, {i};" for i in range(90_000))),
    "doubling calls": lambda: module("call f0;", declarations=chain(30)),
    "empty functions": lambda: module("call f0;", declarations=chain(30, "")),
    "deep calls": lambda: module("call f0;", declarations=chain(5000)),
    "variables": lambda: HEADER + ".global .b8 v[1000000000];\n" * 3,
    "many variables": lambda: HEADER + "\n".join(f".global .u32 v{i};" for i in range(100_000)),
    "initial value": lambda: HEADER + ".global .u32 v[] = {" + "{" * 5000 + "1" + "}" * 5000 + "};",
    "parameters": lambda: (
        HEADER + ".entry k(" + ",".join(f".param .u64 p{i}" for i in range(9000)) + ") { ret; }"
    ),
    "operands": lambda: module("add.u32 " + ", ".join(["%r1"] * 100_000) + ";"),
    "long word": lambda: module("a" * 3_000_000 + ";"),
    "string": lambda: HEADER + '.file 1 "' + "x" * 3_000_000,
    "targets": lambda: module(
        "brx.idx %r5, T; T: .branchtargets " + ", ".join(["E"] * 100_000) + "; E:"
    ),
}


@pytest.mark.parametrize("case", HUGE)
def test_huge_ptx_module_is_handled_in_seconds(soft, case):
    text = HUGE[case]()
    start = time.process_time()
    assert load(soft, text) in TYPED
    assert time.process_time() - start < 5


# ---- execution of mutants ------------------------------------------------------------------------

RUN = """
for text in {texts!r}:
    result = d.cuModuleLoadData(text.encode() + b"\\0")
    if int(result[0]) != 0:
        print(result[0].name)
        continue
    pointers = [s.put(np.arange(1024, dtype=np.uint32) * (i + 1)) for i in range(4)]
    s.launch(s.cuModuleGetFunction(result[1], b"k"), 2, 64, *pointers)
    result = code(d.cuCtxSynchronize())
    print(result)
    if result != "SUCCESS": break
"""
#: Results of modules that run or fault.
RESULTS = {
    "SUCCESS", "ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "LAUNCH_FAILED", "LAUNCH_TIMEOUT",
    "CUDA_ERROR_INVALID_PTX", "CUDA_ERROR_NOT_SUPPORTED",
}  # fmt: skip


def run_mutants(count: int, seed: int, **env: str) -> list[str]:
    """Run mutants in child processes and return their results."""
    results: list[str] = []
    texts = mutants(count, seed)
    while len(results) < count:
        # A child process runs mutants until one of them faults.
        batch = texts[len(results) :]
        done = util.run_child(RUN.format(texts=batch), limit=120, SOFTCUDA_PTX_STEPS="5000", **env)
        printed = done.stdout.split()
        assert done.returncode == 0 and printed, (batch[len(printed)], done.stderr[-2000:])
        results += printed
    return results


def test_ptx_mutants_fault_or_run():
    results = run_mutants(30, 5)
    assert set(results) <= RESULTS
    assert results.count("SUCCESS") >= 5 and len(set(results)) >= 4


@pytest.mark.full
@pytest.mark.parametrize(
    "env", [{}, {"SOFTCUDA_PTX_SEED": "9"}, {"SOFTCUDA_RACECHECK": "1"}], ids=["", "seed", "races"]
)
def test_many_ptx_mutants_fault_or_run(env):
    results = run_mutants(100, 6 + len(str(env)), **env)
    assert set(results) <= RESULTS
    assert len(set(results)) >= 5
