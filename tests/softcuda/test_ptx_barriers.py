"""mbarrier objects, pairs of floats and other instructions of recent architectures."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_util import module
from test_ptx import STORE, elementwise, outcome, run_body, run_elementwise

pytestmark = pytest.mark.ptx

PAIRS = {
    "add.rn.f32x2 {d}, {a}, {b};": lambda a, b, c: a + b,
    "sub.rn.f32x2 {d}, {a}, {b};": lambda a, b, c: a - b,
    "mul.rn.f32x2 {d}, {a}, {b};": lambda a, b, c: a * b,
    "fma.rn.f32x2 {d}, {a}, {b}, {c};": lambda a, b, c: (
        a.astype(np.float64) * b + c.astype(np.float64)
    ).astype(np.float32),
}


@pytest.mark.parametrize("text", PAIRS)
def test_ptx_pair_of_floats_equals_numpy(soft, text):
    rng = np.random.default_rng(3)
    # Products of 12-bit values are exact, so that float64 rounds once.
    values = [rng.integers(-2000, 2000, 128).astype(np.float32) / 8 for _ in range(3)]
    sources = 3 if "{c}" in text else 2
    arrays = [x.view(np.uint64) for x in values[:sources]]
    got = run_elementwise(soft, elementwise(text, ("b64",) * sources, "b64"), arrays, "b64")
    np.testing.assert_array_equal(got.view(np.float32), PAIRS[text](*values))


#: Two warps exchange words through shared memory. Thread 0 initializes the object for 64 threads.
EXCHANGE = """
    .shared .align 8 .b64 object;  .shared .align 256 .b8 words[256];
    mov.u32 %r5, object;  mov.u32 %r6, words;  mad.lo.u32 %r7, %r0, 4, %r6;
    setp.ne.u32 %p1, %r0, 0;  @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r5], 64;
READY:
    bar.sync 0;
    mul.lo.u32 %r8, %r0, 5;  st.shared.u32 [%r7], %r8;
    {arrive}
WAIT:
    {wait}
    @!%p2 bra WAIT;
DONE:
    xor.b32 %r9, %r7, 128;  ld.shared.u32 %r10, [%r9];
"""
ARRIVE = "mbarrier.arrive.shared::cta.b64 %rd5, [%r5];"
WAITS = {
    "state": "mbarrier.test_wait.shared::cta.b64 %p2, [%r5], %rd5;",
    "parity": "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r5], 0;",
    "time": "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [%r5], 0, 1000;",
}
SETTINGS = {"none": {}, "seed": {"SOFTCUDA_PTX_SEED": "2"}, "races": {"SOFTCUDA_RACECHECK": "1"}}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_ptx_mbarrier_orders_warps(wait, setting):
    body = EXCHANGE.format(arrive=ARRIVE, wait=WAITS[wait]) + STORE.format(1, "%r10")
    text = outcome(body, block=64, **SETTINGS[setting])
    assert str([5 * (i ^ 32) for i in range(64)]) in text


def test_ptx_mbarrier_without_wait_is_a_race():
    body = EXCHANGE.format(arrive=ARRIVE, wait="bra DONE;") + STORE.format(1, "%r10")
    text = outcome(body, block=64, SOFTCUDA_RACECHECK="1")
    assert "race in shared memory" in text


def test_ptx_mbarrier_counts_arrivals(soft):
    """The phase is complete after 3 arrivals; one of them drops its thread from the next phase."""
    body = """
        .shared .align 8 .b64 object;  mov.u32 %r5, object;  mov.u32 %r9, 0;
        mbarrier.init.shared.b64 [%r5], 3;
        mbarrier.arrive.noComplete.shared.b64 %rd5, [%r5], 2;
        mbarrier.pending_count.b64 %r6, %rd5;
        mbarrier.test_wait.parity.shared.b64 %p2, [%r5], 0;  @%p2 add.u32 %r9, %r9, 100;
        mbarrier.arrive_drop.shared.b64 _, [%r5];
        mbarrier.test_wait.parity.shared.b64 %p2, [%r5], 0;  @%p2 add.u32 %r9, %r9, 10;
        mbarrier.arrive.shared.b64 %rd6, [%r5], 2;
        mbarrier.test_wait.parity.shared.b64 %p2, [%r5], 1;  @%p2 add.u32 %r9, %r9, 1;
        mad.lo.u32 %r9, %r6, 1000, %r9;
        mbarrier.inval.shared.b64 [%r5];
    """
    got = run_body(soft, body + STORE.format(0, "%r9"), [], np.zeros(1, np.uint32), block=1)
    assert got[0] == 3011


def test_ptx_cp_async_arrives_at_mbarrier():
    """The data of cp.async has replaced the 0xff bytes in its destination when the phase ends."""
    body = """
        .shared .align 512 .b8 tile[512];  .shared .align 8 .b64 object;
        mov.u32 %r5, object;  mov.u32 %r6, tile;  mad.lo.u32 %r7, %r0, 16, %r6;
        setp.ne.u32 %p1, %r0, 0;  @!%p1 mbarrier.init.shared.b64 [%r5], 32;  bar.sync 0;
        mad.wide.u32 %rd4, %r0, 16, %rd0;
        cp.async.ca.shared.global [%r7], [%rd4], 16;
        cp.async.mbarrier.arrive.noinc.shared.b64 [%r5];
    WAIT:
        mbarrier.test_wait.parity.shared.b64 %p2, [%r5], 0;  @!%p2 bra WAIT;
        xor.b32 %r8, %r7, 16;  ld.shared.u32 %r9, [%r8+8];
    """
    text = outcome(body + STORE.format(1, "%r9"), SOFTCUDA_PTX_SEED="5")
    assert str([4 * (i ^ 1) + 2 for i in range(32)])[:-1] in text


FAULTS = {
    "not initialized": "mbarrier.arrive.shared.b64 _, [%r5];",
    "the count 0": "mbarrier.init.shared.b64 [%r5], 0;",
    "3 threads arrive": (
        "mbarrier.init.shared.b64 [%r5], 2; mbarrier.arrive.shared.b64 _, [%r5], 3;"
    ),
    "completes the phase": (
        "mbarrier.init.shared.b64 [%r5], 1; mbarrier.arrive.noComplete.shared.b64 _, [%r5], 1;"
    ),
    "misaligned": "add.u32 %r5, %r5, 4; mbarrier.init.shared.b64 [%r5], 1;",
}


@pytest.mark.parametrize("words", FAULTS)
def test_ptx_mbarrier_misuse_is_a_fault(words):
    body = ".shared .align 8 .b64 object; mov.u32 %r5, object;" + FAULTS[words]
    text = outcome(body, block=1)
    assert words in text and "PTX line" in text and "mbarrier" in text


def test_ptx_mbarrier_transactions_are_refused(soft):
    text = module("mbarrier.arrive.expect_tx.shared.b64 _, [%r0], 16;")
    assert soft.d.cuModuleLoadData(text.encode() + b"\0")[0].name == "CUDA_ERROR_NOT_SUPPORTED"
