"""What other users of the driver's interface rely on: cuda.core, cuda-python, and their users."""

from __future__ import annotations

import pytest
from softcuda_util import check, codes


def test_errors_have_their_public_names(soft):
    """cuGetErrorName and cuGetErrorString know the codes that are answered, by published names."""
    known = [error for error in soft.d.CUresult if soft.d.cuGetErrorName(error)[1]]
    assert len(known) == 30
    for error in known:
        assert soft.cuGetErrorName(error).decode() == error.name
        assert soft.cuGetErrorString(error)


def test_contexts_can_be_created(soft):
    """A created context is current, shares all with the primary one, and can be destroyed."""
    d = soft.d
    made = soft.cuCtxCreate(None, 0, 0)
    assert int(made) == int(soft.cuCtxGetCurrent()) != int(soft.context)
    soft.cuMemFree(soft.alloc(16))
    soft.cuCtxDestroy(made)
    assert int(soft.cuCtxGetCurrent()) == int(soft.context)
    ended = [call(made) for call in (d.cuCtxDestroy, d.cuCtxSetCurrent, d.cuCtxPushCurrent)]
    assert codes(*ended) == {"INVALID_CONTEXT"}


CHILDREN = {
    "memory ends where it is said to end": (
        """
half = s.alloc(600_000)
assert s.cuMemGetInfo() == (400_000, 1_000_000)
assert "600000 bytes were requested, 400000 are free" in refused(d.cuMemAlloc(600_000), 2)
s.cuMemFreeHost(s.cuMemHostAlloc(2_000_000, 2))
s.cuMemFree(half)
s.cuMemFree(s.alloc(1_000_000))
""",
        {"SOFTCUDA_MEMORY": "1000000"},
    ),
    "freed addresses come again only when all were used": (
        """
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
seen = []
while len(seen) == len(set(seen)) < 100:
    kept = s.alloc(16)
    seen.append(s.alloc(256 << 20))
    s.cuMemFree(kept)
    s.cuMemFree(seen[-1])
assert 10 < len(seen) < 100, len(seen)
assert "freed" in refused(d.cuMemsetD8(seen[-2], 0, 1), 1)
assert "ulimit -v" in refused(d.cuMemAlloc(9 << 30), 2)
""",
        {},
    ),
    "fresh device memory reads as NaN, so missing writes show": (
        "assert np.isnan(s.get(s.alloc(4096), 1024, np.float32)).all()",
        {"SOFTCUDA_POISON": "1"},
    ),
    "the n-th call fails on demand": (
        """
s.cuMemFree(s.alloc(16))
assert "SOFTCUDA_FAIL" in refused(d.cuMemAlloc(16), 2)
s.cuMemFree(s.alloc(16))
refused(d.cuStreamCreate(1), 999)
s.stream()
""",
        {"SOFTCUDA_FAIL": "cuMemAlloc:2,cuStreamCreate:1:999"},
    ),
    "a forked child is told so": (
        """
import os
child = os.fork()
if child == 0:
    codes = {int(r[0]) for r in (d.cuInit(0), d.cuMemAlloc(16), d.cuCtxSynchronize(),
                                 d.cuStreamCreate(1), d.cuMemGetInfo())}
    os._exit(0 if codes == {3} and d.cuGetErrorName(d.CUresult(3))[1] else 1)
assert os.waitpid(child, 0)[1] == 0
s.alloc(16)
""",
        {},
    ),
    "a fault is named though another library took the signal": (
        """
import signal
signal.signal(signal.SIGSEGV, lambda *_: None)
s.launch(add, 1, 1, s.alloc(16) + 16, np.int32(1))
assert code(d.cuCtxSynchronize()) == "ILLEGAL_ADDRESS" and "'add'" in s.fault()
""",
        {},
    ),
    "kernels print": ("s.run(kernels.say, 1, 2, np.int32(4))", {}),
}
SETUP = """
import os, resource
add = kernels.add
def refused(result, code):
    assert int(result[0]) == code, result
    return s.refusal()
"""


@pytest.mark.parametrize("name", CHILDREN)
def test_settings_and_processes(name):
    """What the name says, in a process of its own with the settings beside it."""
    code, settings = CHILDREN[name]
    said = check(SETUP + code, **settings)
    assert said.splitlines() == (
        ["thread 4 of block", "thread 5 of block"] if name == "kernels print" else []
    )
