"""Old values of host memory that weak loads may read, on hand-written PTX with a seed."""

from __future__ import annotations

import pytest
import softcuda_util as util
from ptx_util import module
from test_ptx import outcome

pytestmark = pytest.mark.ptx

#: Words of host memory: data at byte 0, a flag of the device at byte 1,024 and the flag of the host
#: at byte 2,048. After the device has set its flag, the host stores 7 as data and sets its flag.
#: The kernel stores the data that it sees at byte 3,072. k_1 is device memory.
HOST = """
text = {text!r}
k = s.cuModuleGetFunction(s.cuModuleLoadData(text.encode() + b"\\0"), b"k")
host = int(s.cuMemHostAlloc(4096, 3))
words = np.ctypeslib.as_array((ctypes.c_uint32 * 1024).from_address(host))
words[:] = 0
address = int(s.cuMemHostGetDevicePointer(host, 0))
s.launch(k, {grid}, {block}, address, s.put(np.zeros(64, np.uint32)))
while words[256] != 1: pass
words[0] = 7
words[1] = 7
words[512] = 1
done = s.d.cuCtxSynchronize()[0].name
print(done, words[768], s.fault() if done != "CUDA_SUCCESS" else "")
"""

KERNEL = """
    {before}
    {first}
    {poll}
    st.relaxed.sys.global.u32 [%rd0+1024], 1;
WAIT:
    {poll}
    setp.eq.u32 %p1, %r6, 0;  @%p1 bra WAIT;
    {after}
    ld.global.u32 %r7, [%rd0];
    st.global.u32 [%rd0+3072], %r7;
DONE:
"""
FIRST = "ld.global.u32 %r5, [%rd0];"
RELAXED = "ld.relaxed.sys.global.u32 %r6, [%rd0+2048];"


def kernel_sees(
    poll: str = RELAXED,
    after: str = "",
    *,
    first: str = FIRST,
    before: str = "",
    grid: int = 1,
    block: int = 1,
    seed: str = "1",
) -> str:
    """Return the result of the launch and the data that the kernel saw."""
    body = KERNEL.format(poll=poll, after=after, first=first, before=before)
    text = HOST.format(text=module(body, 2), grid=grid, block=block)
    settings = {"SOFTCUDA_PTX_SEED": seed} if seed else {}
    done = util.run_child(text, SOFTCUDA_WORKERS="2", SOFTCUDA_PTX_STEPS="10000000", **settings)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout.strip().removeprefix("CUDA_")


WEAK_POLLS = {
    "weak": "ld.global.u32 %r6, [%rd0+2048];",
    "weak, cached in L2 only": "ld.global.cg.u32 %r6, [%rd0+2048];",
    "weak, after a barrier": "bar.sync 0; ld.global.u32 %r6, [%rd0+2048];",
}
STRONG_POLLS = {
    "volatile": "ld.volatile.global.u32 %r6, [%rd0+2048];",
    "relaxed": RELAXED,
    "acquire": "ld.acquire.sys.global.u32 %r6, [%rd0+2048];",
    "atomic": "atom.relaxed.sys.global.or.b32 %r6, [%rd0+2048], 0;",
    "weak, after a fence": "membar.sys; ld.global.u32 %r6, [%rd0+2048];",
}


@pytest.mark.parametrize("poll", WEAK_POLLS.values(), ids=WEAK_POLLS)
def test_weak_loads_may_poll_for_ever(poll: str) -> None:
    seen = kernel_sees(poll)
    assert seen.startswith("ERROR_LAUNCH_TIMEOUT 0"), seen
    assert "SOFTCUDA_PTX_STEPS" in seen


@pytest.mark.parametrize("poll", STRONG_POLLS.values(), ids=STRONG_POLLS)
def test_strong_loads_see_flag_of_host(poll: str) -> None:
    assert kernel_sees(poll, "membar.sys;") == "SUCCESS 7"


ACQUIRED = {
    "acquire.sys": ("ld.acquire.sys.global.u32 %r6, [%rd0+2048];", ""),
    "atomic acquire.sys": ("atom.acquire.sys.global.or.b32 %r6, [%rd0+2048], 0;", ""),
    "fence.sys": (RELAXED, "membar.sys;"),
    "fence.acq_rel.sys": (RELAXED, "fence.acq_rel.sys;"),
    "strong load of the data": (RELAXED, "ld.relaxed.sys.global.u32 %r8, [%rd0];"),
}
NOT_ACQUIRED = {
    "relaxed": (RELAXED, ""),
    "volatile": ("ld.volatile.global.u32 %r6, [%rd0+2048];", ""),
    "acquire.gpu": ("ld.acquire.gpu.global.u32 %r6, [%rd0+2048];", ""),
    "atomic acquire.gpu": ("atom.acquire.gpu.global.or.b32 %r6, [%rd0+2048], 0;", ""),
    "atomic release.sys": ("atom.release.sys.global.or.b32 %r6, [%rd0+2048], 0;", ""),
    "fence.cta": (RELAXED, "membar.cta;"),
    "fence.gpu": (RELAXED, "membar.gl;"),
    "barrier": (RELAXED, "bar.sync 0;"),
}


@pytest.mark.parametrize("poll", ACQUIRED.values(), ids=ACQUIRED)
def test_kernel_sees_data_of_host_after_acquire_operation_of_the_system(
    poll: tuple[str, str],
) -> None:
    assert kernel_sees(*poll) == "SUCCESS 7"


@pytest.mark.parametrize("poll", NOT_ACQUIRED.values(), ids=NOT_ACQUIRED)
def test_kernel_may_miss_data_without_acquire_operation_of_the_system(
    poll: tuple[str, str],
) -> None:
    assert kernel_sees(*poll) == "SUCCESS 0"


@pytest.mark.parametrize(
    "first", ["ld.global.u32 %r5, [%rd0+4];", "ld.relaxed.sys.global.u32 %r5, [%rd0+64];"]
)
def test_load_may_read_data_that_an_earlier_load_has_fetched(first: str) -> None:
    """A cache line has more words than the one that was loaded."""
    assert kernel_sees(first=first) == "SUCCESS 0"
    assert kernel_sees(after="membar.sys;", first=first) == "SUCCESS 7"


def test_kernel_sees_data_without_a_seed() -> None:
    assert kernel_sees(WEAK_POLLS["weak"], seed="") == "SUCCESS 7"


#: Warp 1 polls and passes a barrier before warp 0 loads the data.
OTHER_WARP = "setp.lt.u32 %p2, %r0, 32;  @%p2 bra SEEN;"
SEEN = "{} SEEN: bar.sync 0;  setp.ne.u32 %p2, %r0, 0;  @%p2 bra DONE;"


def test_acquire_operation_of_another_warp_and_barrier_order_loads() -> None:
    first = FIRST + "bar.sync 0;" + OTHER_WARP
    assert kernel_sees(after=SEEN.format("membar.sys;"), first=first, block=64) == "SUCCESS 7"
    assert kernel_sees(after=SEEN.format(""), first=first, block=64) == "SUCCESS 0"


#: Block 1 polls and sets a flag of the device, on which block 0 waits.
OTHER_BLOCK = """
    setp.ne.u32 %p3, %r0, 0; @%p3 bra DONE;
    setp.eq.u32 %p3, %r1, 1;  @%p3 bra START;
    ld.global.u32 %r5, [%rd0];
    st.relaxed.gpu.global.u32 [%rd1+4], 1;
TAKE:
    ld.{take}.global.u32 %r8, [%rd1];
    setp.eq.u32 %p4, %r8, 0;  @%p4 bra TAKE;
    bra LOAD;
START:
    ld.relaxed.gpu.global.u32 %r8, [%rd1+4];
    setp.eq.u32 %p4, %r8, 0;  @%p4 bra START;
"""
GIVE = "{}  st.release.gpu.global.u32 [%rd1], 1;  bra DONE;  LOAD:"


@pytest.mark.parametrize(
    ("fence", "take", "expected"),
    [
        ("membar.sys;", "acquire.gpu", 7),
        ("membar.gl;", "acquire.gpu", 0),
        ("", "acquire.gpu", 0),
        ("membar.sys;", "relaxed.gpu", 0),
    ],
)
def test_acquire_operation_of_another_block_orders_loads(
    fence: str, take: str, expected: int
) -> None:
    # Workers share the blocks of large kernels only.
    before = OTHER_BLOCK.format(take=take)
    seen = kernel_sees(after=GIVE.format(fence), before=before, grid=2, block=1024)
    assert seen == f"SUCCESS {expected}"


#: The kernel loads words of host memory that it has stored itself, before and after the stores have
#: left its buffers.
OWN_STORES = """
    setp.ne.u32 %p1, %r0, 0;  @%p1 bra DONE;
    ld.global.u32 %r5, [%rd0];
    st.global.u32 [%rd0], 1;  ld.global.u32 %r6, [%rd0];  st.global.u32 [%rd1], %r6;
    {publish}
    ld.global.u32 %r6, [%rd0];  st.global.u32 [%rd1+4], %r6;
    st.relaxed.sys.global.u32 [%rd0], 2;
    ld.global.u32 %r6, [%rd0];  st.global.u32 [%rd1+8], %r6;
    atom.relaxed.gpu.global.add.u32 %r7, [%rd0], 1;
    ld.global.u32 %r6, [%rd0];  st.global.u32 [%rd1+12], %r6;
DONE:
"""


@pytest.mark.parametrize("publish", ["", "bar.sync 0;", "membar.gl;", "membar.sys;"])
def test_thread_loads_its_own_stores_to_host_memory(publish: str) -> None:
    text = f"""
text = {module(OWN_STORES.format(publish=publish), 2)!r}
k = s.cuModuleGetFunction(s.cuModuleLoadData(text.encode() + b"\\0"), b"k")
host = int(s.cuMemHostAlloc(4096, 3))
out = s.put(np.zeros(4, np.uint32))
s.launch(k, 1, 1, int(s.cuMemHostGetDevicePointer(host, 0)), out)
s.cuCtxSynchronize()
print(s.get(out, 4, np.uint32).tolist())
"""
    done = util.run_child(text, SOFTCUDA_PTX_SEED="1")
    assert done.stdout.strip() == "[1, 1, 2, 3]", (done.stdout, done.stderr)


def test_device_memory_is_always_current() -> None:
    body = """
    setp.ne.u32 %p1, %r0, 0;  @%p1 bra DONE;
    ld.global.u32 %r5, [%rd0];
    atom.relaxed.gpu.global.add.u32 %r7, [%rd0], 5;
    ld.global.u32 %r5, [%rd0];  st.global.u32 [%rd1], %r5;
DONE:
"""
    assert "[5, 0" in outcome(body, SOFTCUDA_PTX_SEED="1")
