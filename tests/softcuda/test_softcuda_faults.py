"""Faults of device code: their texts and the sticky error.

A fault makes the device unusable for the rest of the process, so each test runs its code in a child
process.
"""

from __future__ import annotations

import pytest
import softcuda_util as util

KERNELS = r"""
#include <cassert>
extern "C" __global__ void write_at(int* p, long long i) {
  if (blockIdx.x == 2 && threadIdx.x == 5) p[i] = 1;
}
extern "C" __global__ void read_at(const int* p, long long i, int* out) { *out = p[i]; }
extern "C" __global__ void diverge(int* p) {
  if (threadIdx.x % 2) p[0] = __shfl_sync(0xffffffffu, 1, 0);
  else p[1] = __ballot_sync(0xffffffffu, 1);
}
extern "C" __global__ void half_barrier(int* p) {
  if (threadIdx.x % 2) __syncwarp(); else __syncthreads();
  p[threadIdx.x] = 1;
}
extern "C" __global__ void stranger(int* p) { p[threadIdx.x] = __shfl_sync(0x1u, 1, 0); }
extern "C" __global__ void follow(const unsigned long long* p, int* out) {
  *out = *reinterpret_cast<const int*>(p[0]);
}
extern "C" __global__ void shared_over(int n) {
  extern __shared__ int s[];
  for (int i = 0; i <= n; ++i) s[i] = i;
  __syncthreads();
}
extern "C" __global__ void divide(int* p) { p[0] = p[2] / p[1]; }
extern "C" __global__ void trap(int* p) { if (p[0] == 0) __trap(); }
extern "C" __global__ void asserting(int* p) { assert(p[0] == 42); }
extern "C" __global__ void jump(int* p) { reinterpret_cast<void (*)()>(p)(); }
extern "C" __global__ void nop(int* p) { *p += 1; }
__device__ int deep(int n, volatile char* up) {
  volatile char local[4096];
  local[n & 4095] = 1;
  return n == 0 ? up[0] : deep(n - 1, local) + local[n & 4095];
}
extern "C" __global__ void overflow(int* p) { char c = 0; *p = deep(1000000, &c); }
"""

SETUP = """
p = s.ints(*[0] * 100)
def faulted(expected, *words):
    assert code(d.cuCtxSynchronize()) == expected, s.fault()
    for word in words:
        assert word in s.fault(), (word, s.fault())
"""


def check(body: str, **env: str) -> None:
    """Run code in a child process.

    The code can use the kernels ``f`` of ``KERNELS``, 100 words of device memory ``p``, and
    ``faulted(code, *words)``, which checks the error code and the text of the fault.
    """
    util.check(f"f = s.kernels({KERNELS!r})\n{SETUP}{body}", **env)


ADDRESS = "ILLEGAL_ADDRESS"
FAILED = "LAUNCH_FAILED"
WRITE = "'write_at' block (2,0,0) thread (5,0,0): illegal write"
# Faults by name: (arguments of the launch, error code, parts of the fault's error text).
FAULTS = {
    "past the end": (
        "f.write_at, 4, 8, p, np.int64(100)",
        ADDRESS,
        [WRITE, "0 bytes past the end", "400 bytes at", "parameter 0"],
    ),
    "before": (
        "f.write_at, 4, 8, p, np.int64(-950)",
        ADDRESS,
        [WRITE, "bytes before", "parameter 0"],
    ),
    "far past": ("f.write_at, 4, 8, p, np.int64(1100)", ADDRESS, [WRITE]),
    "wild": ("f.read_at, 1, 1, p, np.int64(1 << 45), p", ADDRESS, ["kernel 'read_at'"]),
    "device address in memory": (
        "f.follow, 1, 1, s.put([p], np.uint64), p",
        ADDRESS,
        ["untranslated device address", "'follow'"],
    ),
    "dynamic shared memory": (
        "f.shared_over, 1, 1, np.int32(64), shared=256",
        ADDRESS,
        ["past the end of 256 bytes of dynamic shared memory"],
    ),
    "jump": ("f.jump, 1, 1, p", ADDRESS, ["a jump into device allocation #"]),
    "barrier": (
        "f.half_barrier, 1, 64, p",
        FAILED,
        [
            "'half_barrier' block (0,0,0)",
            "divergent barrier",
            "32 threads at __syncthreads",
            "32 at warp operations",
            "missing lanes 0x55555555",
        ],
    ),
    "vote and shuffle": (
        "f.diverge, 1, 32, p",
        FAILED,
        ["divergent barrier", "32 at warp operations"],
    ),
    "mask without calling lane": (
        "f.stranger, 1, 32, p",
        FAILED,
        ["__shfl_sync with mask 0x1", "thread (1,0,0)"],
    ),
    "division": ("f.divide, 1, 1, p", FAILED, ["by zero, or of the smallest integer by -1"]),
    "trap": ("f.trap, 1, 1, p", FAILED, ["__trap"]),
    "assert": ("f.asserting, 1, 1, p", "ASSERT", ["assertion failed: p[0] == 42"]),
    "stack": ("f.overflow, 1, 1, p", FAILED, ["stack overflow"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_text_names_kernel_thread_and_memory(name):
    launch, code, words = FAULTS[name]
    check(f"s.try_launch({launch})\nfaulted({code!r}, *{words!r})")


def test_fault_is_returned_by_every_later_call():
    """After a fault, every driver call returns the code of the fault.

    Host functions that were queued after the faulting kernel do not run, but events complete. Live
    resources are counted as leaked.
    """
    check("""
stream, event = s.stream(), s.cuEventCreate(0)
called, gate = [], threading.Event()
hold = CALLBACK(lambda _: gate.wait(20) and None)
callback = CALLBACK(lambda _: called.append(1))
s.host(stream, hold)
s.launch(f.write_at, 4, 8, p, np.int64(100), stream=stream)
s.host(stream, callback)
s.cuEventRecord(event, stream)
gate.set()
illegal = d.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
assert d.cuStreamSynchronize(stream)[0] == illegal
time.sleep(0.05)
assert called == []
before = s.fault()
assert d.cuMemAlloc(4)[0] == d.cuEventQuery(event)[0] == illegal
assert s.fault() == before
assert d.cuDevicePrimaryCtxRelease(0)[0] == 0
assert set(s.live().values()) == {0}
leaked = s.leaked()
assert leaked["device_memory"] == leaked["module"] == leaked["stream"] == leaked["event"] == 1
assert leaked["graph"] == 0
""")


def test_fault_misaligned_access_is_detected_with_alignment_setting():
    """With SOFTCUDA_ALIGNMENT=1, a vector load from a misaligned address is a fault."""
    check(
        """
run = s.kernels('''extern "C" __global__ void quad(const float4* p, float* out) {
  const float4 v = *p; *out = v.x + v.w; }''').quad
s.run(run, 1, 1, p, p)
s.launch(run, 1, 1, p + 4, p)
faulted("MISALIGNED_ADDRESS", "'quad'", "misaligned access")
""",
        SOFTCUDA_ALIGNMENT="1",
    )


@pytest.mark.parametrize(
    ("destroy", "words"),
    [
        ("cuMemFree(p)", ["use after free", "'nop' parameter 0", "freed device"]),
        ("cuModuleUnload(f.module)", ["launched after its module had been unloaded"]),
    ],
)
def test_fault_graph_launch_detects_freed_memory_and_unloaded_module(destroy, words):
    """A graph launch raises a fault if a kernel node uses freed memory or an unloaded module.

    The kernel does not run.
    """
    check(f"""
g = s.cuGraphCreate(0)
s.add_kernel(g, [], f.nop, 1, 1, p)
e = s.cuGraphInstantiate(g, 0)
s.{destroy}
s.cuGraphLaunch(e, s.stream())
faulted("ILLEGAL_ADDRESS", *{words!r})
""")


def test_fault_of_host_code_ends_process():
    """A segmentation fault of host code reaches faulthandler and terminates the process.

    Only signals that device code has raised become sticky errors.
    """
    done = util.run_child("import faulthandler; faulthandler.enable()\nctypes.string_at(8, 1)")
    assert done.returncode == -11 and "Segmentation fault" in done.stderr


def test_fault_on_one_of_several_workers_wakes_all_waits():
    check(
        """
stream = [s.stream() for _ in range(4)]
nop, bad = f.nop, f.write_at
def many():
    for i in range(200):
        s.try_launch(nop, 1, 1, p, stream=stream[i % 4])
many()
event = s.cuEventCreate(2)
s.try_launch(bad, 64, 32, p, np.int64(100), stream=stream[1])
d.cuEventRecord(event, stream[1])
for other in stream:
    d.cuStreamWaitEvent(other, event, 0)  # no stream is complete before the fault
many()
assert in_threads(lambda q: code(d.cuStreamSynchronize(q)), *stream) == ["ILLEGAL_ADDRESS"] * 4
""",
        SOFTCUDA_WORKERS="4",
    )


def test_fault_completes_pending_events_and_memory_operations():
    """A fault completes work that is still pending, so that no thread waits forever.

    The pending work is a graph launch with an event after it, and a stream wait for a word that
    no thread writes.
    """
    util.check("""
    a, b, c, words, never = s.stream(), s.stream(), s.stream(), Words(s, 1), Words(s, 1)
    event, graph = s.cuEventCreate(0), s.cuGraphCreate(0)
    s.cuGraphAddEventRecordNode(graph, [], 0, event)
    executable = s.cuGraphInstantiate(graph, 0)
    never.block(c)
    words.block(a)
    s.launch(kernels.stray, 1, 1, s.ints(0), stream=a)
    s.cuGraphLaunch(executable, a)
    s.cuStreamWaitEvent(b, event, 0)
    words[0] = 1
    ended = d.cuEventSynchronize(event), d.cuStreamSynchronize(b), d.cuStreamSynchronize(c)
    assert [code(result) for result in ended] == ["ILLEGAL_ADDRESS"] * 3
    """)


@pytest.mark.parametrize(
    ("size", "index", "words"),
    [
        (100, -1, "4 bytes before the start"),
        (100, 25, "0 bytes past the end"),
        (7 << 18, -60000, "240000 bytes before the start"),
    ],
)
def test_fault_small_overrun_is_detected_at_free(size, index, words):
    """Freeing an allocation detects writes between the allocation and its guard page.

    The guard page itself does not detect them. The check also works for allocations in huge pages.
    """
    check(f"""
q = s.alloc({size})
s.run(f.write_at, 4, 8, q, np.int64({index}))
assert code(d.cuMemFree(q)) == "ILLEGAL_ADDRESS"
assert {words!r} in s.fault() and "{size} bytes at" in s.fault(), s.fault()
""")
