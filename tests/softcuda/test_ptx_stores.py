"""Buffers of stores that are not visible everywhere yet, on hand-written PTX with a seed."""

from __future__ import annotations

from typing import Any

import pytest
import softcuda_util as util
from ptx_util import module
from test_ptx import outcome

pytestmark = pytest.mark.ptx

#: Words of host memory: data at 0 and 64, a flag at 128, and the host's answer at 192. The host
#: answers each flag and counts flags whose data it did not see. k_1 is device memory.
HOST = """
text = {text!r}
k = s.cuModuleGetFunction(s.cuModuleLoadData(text.encode() + b"\\0"), b"k")
host = int(s.cuMemHostAlloc(4096, 3))
words = np.ctypeslib.as_array((ctypes.c_uint32 * 64).from_address(host))
words[:] = 0
address = int(s.cuMemHostGetDevicePointer(host, 0))
s.launch(k, {grid}, {block}, address, s.put(np.zeros(64, np.uint32)))
stale = 0
for number in range(1, {rounds} + 1):
    while words[32] != number: pass
    stale += bool(words[0] != number or words[16] != number)
    words[48] = number
s.cuCtxSynchronize()
print("stale" if stale else "current", words[0], words[16])
"""

#: {publish} stores %r5 in the flag after the two stores to data.
ROUNDS = """
    mov.u32 %r5, 0;
    {before}
LOOP:
    add.u32 %r5, %r5, 1;
    {data}
    {publish}
WAIT:
    ld.acquire.sys.global.u32 %r6, [%rd0+192];
    setp.lt.u32 %p1, %r6, %r5;  @%p1 bra WAIT;
    setp.lt.u32 %p2, %r5, {rounds};  @%p2 bra LOOP;
DONE:
"""
DATA = "st.global.u32 [%rd0], %r5;  st.global.u32 [%rd0+64], %r5;"
FLAG = "st.relaxed.sys.global.u32 [%rd0+128], %r5;"
COUNT = 40


def host_sees(publish: str, data: str = DATA, before: str = "", **launch: Any) -> str:
    """Return "current" if the host saw the data of all flags and "stale" otherwise."""
    body = ROUNDS.format(publish=publish, data=data, before=before, rounds=COUNT)
    size = {"grid": 1, "block": 1, **launch}
    text = HOST.format(text=module(body, 2), rounds=COUNT, **size)
    done = util.run_child(text, SOFTCUDA_PTX_SEED="1", SOFTCUDA_WORKERS="2")
    assert done.returncode == 0, (done.stdout, done.stderr)
    seen, *words = done.stdout.split()
    assert words == [str(COUNT)] * 2  # everything is visible after the kernel
    return seen


PUBLISHED = {
    "fence.sys": "membar.sys;" + FLAG,
    "release.sys": "st.release.sys.global.u32 [%rd0+128], %r5;",
    "atomic release.sys": "atom.release.sys.global.exch.b32 %r7, [%rd0+128], %r5;",
}
NOT_PUBLISHED = {
    "no fence": FLAG,
    "volatile": "st.volatile.global.u32 [%rd0+128], %r5;",
    "atomic": "atom.relaxed.sys.global.exch.b32 %r7, [%rd0+128], %r5;",
    "fence after the flag": FLAG + "membar.sys;",
    "fence.cta": "membar.cta;" + FLAG,
    "fence.gpu": "membar.gl;" + FLAG,
    "release.cta": "st.release.cta.global.u32 [%rd0+128], %r5;",
    "release.gpu": "st.release.gpu.global.u32 [%rd0+128], %r5;",
    "barrier": "bar.sync 0;" + FLAG,
}


@pytest.mark.parametrize("publish", PUBLISHED.values(), ids=PUBLISHED)
def test_host_sees_stores_that_precede_a_fence_or_release_of_the_system(publish):
    assert host_sees(publish) == "current"


@pytest.mark.parametrize("publish", NOT_PUBLISHED.values(), ids=NOT_PUBLISHED)
def test_host_may_miss_stores_without_a_fence_of_the_system(publish):
    assert host_sees(publish) == "stale"


OTHER_WARP = """
    setp.ne.u32 %p3, %r0, 32;
    @!%p3 st.global.u32 [%rd0], %r5;
    @!%p3 st.global.u32 [%rd0+64], %r5;
    {}
"""
THREAD_0 = "setp.ne.u32 %p4, %r0, 0; @%p4 bra WAIT; {}"


def test_fence_publishes_stores_of_other_warps_before_a_barrier():
    data = OTHER_WARP.format("bar.sync 0;")
    assert host_sees(THREAD_0.format("membar.sys;" + FLAG), data, block=64) == "current"
    assert host_sees(THREAD_0.format("membar.gl;" + FLAG), data, block=64) == "stale"


#: Block 1 writes the data of each round and sets a flag of the device, on which block 0 waits.
OTHER_BLOCK = """
    setp.eq.u32 %p3, %r1, 0;  @%p3 bra TAKE;
    st.global.u32 [%rd0], %r5;  st.global.u32 [%rd0+64], %r5;
    {fence}
    st.relaxed.gpu.global.u32 [%rd1], %r5;
    bra WAIT;
TAKE:
    ld.acquire.gpu.global.u32 %r8, [%rd1];
    setp.lt.u32 %p4, %r8, %r5;  @%p4 bra TAKE;
"""


def test_fence_publishes_stores_that_another_block_published_to_it():
    # Workers share the blocks of large kernels only.
    launch = {"before": "setp.ne.u32 %p3, %r0, 0; @%p3 bra DONE;", "grid": 2, "block": 1024}
    ordered = OTHER_BLOCK.format(fence="membar.gl;")
    assert host_sees("membar.sys;" + FLAG, ordered, **launch) == "current"
    assert host_sees("membar.gl;" + FLAG, ordered, **launch) == "stale"
    unordered = OTHER_BLOCK.format(fence="")
    assert host_sees("membar.sys;" + FLAG, unordered, **launch) == "stale"


FORWARDING = """
    setp.ne.u32 %p1, %r0, 0;  @%p1 bra DONE;
    st.global.u32 [%rd1], 0x01020304;
    mov.u32 %r5, 0x55;  cvt.u16.u32 %h1, %r5;
    st.global.u8 [%rd1+1], %h1;
    ld.global.u32 %r6, [%rd1];  st.global.u32 [%rd1+4], %r6;
    ld.global.v2.u32 {%r7, %r8}, [%rd1];  st.global.u32 [%rd1+8], %r8;
    st.global.v2.u32 [%rd1+16], {%r7, %r0};
    atom.global.add.u32 %r9, [%rd1], 1;  st.global.u32 [%rd1+12], %r9;
    ld.volatile.global.u32 %r10, [%rd1];  st.global.u32 [%rd1+24], %r10;
    st.volatile.global.u32 [%rd1], 7;  ld.global.u32 %r11, [%rd1];  st.global.u32 [%rd1+28], %r11;
DONE:
"""


@pytest.mark.parametrize("seed", range(4))
def test_thread_loads_its_own_stores(seed):
    text = outcome(FORWARDING, SOFTCUDA_PTX_SEED=str(seed))
    value = 0x01025504
    expected = [7, value, value, value, value, 0, value + 1, 7]
    assert text.split("\n")[1].startswith(str(expected)[:-1]), text


#: Each block stores a part and counts itself; the block that counts last adds the parts.
TICKETS = """
    setp.ne.u32 %p1, %r0, 0;  @%p1 bra DONE;
    mad.wide.u32 %rd4, %r1, 4, %rd0;  add.u32 %r5, %r1, 100000;
    st.global.u32 [%rd4], %r5;
    {}
    atom.global.inc.u32 %r6, [%rd1], 3;
    setp.ne.u32 %p2, %r6, 3;  @%p2 bra DONE;
    membar.gl;
    ld.global.v4.u32 {{%r8, %r9, %r10, %r11}}, [%rd0];
    add.u32 %r8, %r8, %r9;  add.u32 %r8, %r8, %r10;  add.u32 %r8, %r8, %r11;
    st.global.u32 [%rd1+4], %r8;
DONE:
"""


@pytest.mark.parametrize("seed", range(2))
def test_block_sees_stores_of_another_block_only_after_a_fence(seed):
    def total(fence: str) -> bool:
        text = outcome(TICKETS.format(fence), grid=4, SOFTCUDA_PTX_SEED=str(seed))
        return "[0, 400006," in text

    assert total("membar.gl;")
    assert not total("membar.cta;")
    assert not total("")


#: Warp 1 stores 7, sets a flag in shared memory and stays alive until warp 0 has read the flag and
#: then the 7.
SHARED_FLAG = """
    st.shared.u32 [flags], 0;  st.shared.u32 [flags+4], 0;
    mov.u64 %rd5, flags;  cvta.shared.u64 %rd5, %rd5;
    bar.sync 0;
    setp.lt.u32 %p1, %r0, 32;  @%p1 bra TAKE;
    st.global.u32 [%rd1], 7;
    {}
WAIT:
    ld.acquire.cta.shared.u32 %r6, [flags+4];
    setp.eq.u32 %p2, %r6, 0;  @%p2 bra WAIT;
    bra DONE;
TAKE:
    ld.acquire.cta.shared.u32 %r6, [flags];
    setp.eq.u32 %p2, %r6, 0;  @%p2 bra TAKE;
    ld.global.u32 %r7, [%rd1];  st.global.u32 [%rd1+8], %r7;
    st.relaxed.cta.shared.u32 [flags+4], 1;
DONE:
"""
SHARED_RELEASES = [
    "st.release.cta.shared.u32 [flags], 1;",
    "st.release.cta.u32 [%rd5], 1;",
    "atom.release.cta.shared.exch.b32 %r5, [flags], 1;",
    "atom.acq_rel.cta.exch.b32 %r5, [%rd5], 1;",
    "red.release.gpu.shared.or.b32 [flags], 1;",
]
SHARED_RELAXED = [
    "st.relaxed.cta.shared.u32 [flags], 1;",
    "red.relaxed.gpu.shared.or.b32 [flags], 1;",
]


@pytest.mark.parametrize("publish", SHARED_RELEASES + SHARED_RELAXED)
def test_release_in_shared_memory_publishes_global_stores(publish):
    for seed in ("1", "2"):
        text = outcome(
            SHARED_FLAG.format(publish),
            block=64,
            declarations=".shared .align 8 .b8 flags[8];",
            SOFTCUDA_PTX_SEED=seed,
        )
        seen = 7 if publish in SHARED_RELEASES else 0
        assert f"[7, 0, {seen}, 0," in text, text


def test_host_sees_everything_in_order_without_a_seed():
    assert "[0, 400006," in outcome(TICKETS.format(""), grid=4)
