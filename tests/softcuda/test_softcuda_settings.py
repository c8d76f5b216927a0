"""Settings, contexts, error names and process behaviour of the soft device."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from softcuda_util import check, codes, run_child


def test_error_names_and_strings_are_defined_for_all_codes(soft):
    """Each code of CUresult has the name that CUDA defines, and a text."""
    for error in soft.d.CUresult:
        assert soft.cuGetErrorName(error).decode() == error.name
        assert soft.cuGetErrorString(error)


def test_context_create_makes_context_current_until_destroyed(soft):
    """cuCtxCreate makes a context current until that context is destroyed.

    The primary context is current again afterwards. Both contexts share device memory.
    """
    d = soft.d
    context = soft.cuCtxCreate(None, 0, 0)
    assert int(context) == int(soft.cuCtxGetCurrent())
    assert int(context) != int(soft.context)
    soft.cuMemFree(soft.alloc(16))
    soft.cuCtxDestroy(context)
    assert int(soft.cuCtxGetCurrent()) == int(soft.context)
    results = [call(context) for call in (d.cuCtxDestroy, d.cuCtxSetCurrent, d.cuCtxPushCurrent)]
    assert codes(*results) == {"INVALID_CONTEXT"}


SETUP = """
import os, resource
add = kernels.add
def error_text(result, code):
    assert int(result[0]) == code, result
    return s.refusal()
"""


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("cuMemAlloc:1,cuMemAlocate:2", "'cuMemAlocate:2' does not name a function"),
        ("cuGetErrorName:1", "'cuGetErrorName:1' does not name a function that can fail"),
        ("cuMemAlloc", "'cuMemAlloc' is not of the form function:n"),
        ("cuMemAlloc:0", "'cuMemAlloc:0' is not of the form function:n"),
        ("cuMemAlloc:1x", "'cuMemAlloc:1x' is not of the form function:n"),
        ("cuMemAlloc:1:two", "'cuMemAlloc:1:two' is not of the form function:n"),
    ],
)
def test_setting_fail_is_rejected_if_invalid(setting, words):
    done = run_child("s", SOFTCUDA_FAIL=setting, SOFTCUDA_LOG="1")
    assert done.returncode != 0
    assert f"SOFTCUDA_FAIL: {words}" in done.stderr


#: Script that frees memory of a kind, or unloads a module, before the stream has finished the
#: kernel that uses it. Prints whether the stream was still busy and the fault of the kernel.
FREE_BEFORE_USE = """
import threading
stream, word = s.stream(), Words(s, 1)
pinned = s.cuMemHostAlloc(64, 2)
device = s.alloc(64)
address = {"device": device, "pinned": int(s.cuMemHostGetDevicePointer(pinned, 0))}
word.block(stream)
s.launch_int(kernels.add, address.get("KIND", device), 1, stream)
if "SETTING" != "immediate":
    threading.Timer(0.2, lambda: word.view.fill(1)).start()
if "KIND" == "device": s.cuMemFree(device)
if "KIND" == "pinned": s.cuMemFreeHost(pinned)
if "KIND" == "module": s.cuModuleUnload(kernels.module)
print(code(d.cuStreamQuery(stream)))
word[0] = 1
d.cuStreamSynchronize(stream)
print(s.fault())
"""


@pytest.mark.parametrize("setting", ["", "immediate"])
@pytest.mark.parametrize("kind", ["device", "pinned", "module"])
def test_setting_free_immediate_does_not_wait(kind, setting):
    """With SOFTCUDA_FREE=immediate, a kernel that still uses freed memory or code is a fault."""
    script = FREE_BEFORE_USE.replace("KIND", kind).replace("SETTING", setting)
    busy, text = check(script, SOFTCUDA_FREE=setting).split("\n", 1)
    assert busy == ("NOT_READY" if setting else "SUCCESS")
    freed = "had been unloaded" if kind == "module" else "use after free"
    assert (freed in text) is bool(setting), text


@pytest.mark.parametrize(
    ("model", "calls"),
    [
        (0, {"allocate": "NOT_READY", "query while another thread frees": "NOT_READY"}),
        (8, {"allocate": "NOT_READY", "query while another thread frees": "SUCCESS"}),
        (16, {"allocate": "SUCCESS", "query while another thread frees": "NOT_READY"}),
    ],
)
def test_lock_model_delays_frees_and_allocations(model, calls):
    """With model 8, other calls wait while a call that frees memory waits for the device. With
    model 16, allocations wait for the device.

    The work of the stream ends 0.2 s after the call begins if the call waits for it, and otherwise
    after the state of the stream was queried.
    """
    allocate, query = calls.values()
    out = check(
        f"""
        import threading
        def free(memory):
            s.cuCtxSetCurrent(s.context)
            s.cuMemFree(memory)
        for frees, expected in (False, "{allocate}"), (True, "{query}"):
            stream, word, memory = s.stream(), Words(s, 1), s.alloc(64)
            word.block(stream)
            if frees:
                threading.Thread(target=free, args=(memory,)).start()
                while "cuMemFree: all work to finish" not in s.describe(): time.sleep(0.001)
            finish = lambda: word.view.fill(1)
            if expected == "SUCCESS": threading.Timer(0.2, finish).start()
            s.cuMemGetInfo() if frees else s.alloc(64)
            print(code(d.cuStreamQuery(stream)))
            finish()
            s.cuStreamSynchronize(stream)
        """,
        SOFTCUDA_LOCK_MODEL=str(model),
    )
    assert out.split() == [allocate, query]


@pytest.mark.parametrize("setting", ["SOFTCUDA_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING"])
def test_setting_launch_blocking_completes_launches(setting):
    check(
        """
        stream, graph, p = s.stream(), s.cuGraphCreate(0), s.ints(*range(256))
        for value in range(50):
            s.launch_int(kernels.add, p, value, stream)
            assert code(d.cuStreamQuery(stream)) == "SUCCESS"
        s.add_host(graph, [], USLEEP, 1000)
        run = s.cuGraphInstantiate(graph, 0)
        for _ in range(5):
            s.cuGraphLaunch(run, stream)
            assert code(d.cuStreamQuery(stream)) == "SUCCESS"
        """,
        **{setting: "1"},
    )


@pytest.mark.parametrize(
    ("name", "value", "calls_wait"),
    [
        ("SOFTCUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "0", False),
        ("SOFTCUDA_LOCK_MODEL", "24", True),
        ("SOFTCUDA_LOCK_MODEL", "8", False),
    ],
)
def test_setting_deselects_tests_with_overlap(monkeypatch, name, value, calls_wait):
    for other in ("SOFTCUDA_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING", "SOFTCUDA_LOCK_MODEL"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    conftest = runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))
    assert conftest["calls_wait_for_device"]() == calls_wait


def test_setting_attribute_17_limits_run_time_of_kernels():
    """The attribute KERNEL_EXEC_TIMEOUT is then 1, and a longer kernel is a fault."""
    text = check(
        """
        spin = s.kernels('''extern "C" __global__ void spin(long long ns) {
          const long long end = clock64() + ns;
          while (clock64() < end) {}
        }''').spin
        attribute = d.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT
        assert s.cuDeviceGetAttribute(attribute, 0) == 1
        stream = s.stream()
        for seconds in 0.1, 1.1:
            s.launch(spin, 1, 1, np.int64(seconds * 1e9), stream=stream)
            print(code(d.cuStreamSynchronize(stream)))
        print(s.fault())
        """,
        SOFTCUDA_ATTRIBUTE_17="1",
    )
    assert text.startswith("SUCCESS\nLAUNCH_TIMEOUT\nkernel 'spin' ran for more than 1 s")


def test_setting_memory_limits_device_memory():
    """SOFTCUDA_MEMORY limits the amount of device memory but not of pinned memory."""
    check(
        SETUP
        + """
half = s.alloc(600_000)
assert s.cuMemGetInfo() == (400_000, 1_000_000)
text = error_text(d.cuMemAlloc(600_000), 2)
assert "600000 bytes were requested, 400000 are free" in text
s.cuMemFreeHost(s.cuMemHostAlloc(2_000_000, 2))
s.cuMemFree(half)
s.cuMemFree(s.alloc(1_000_000))
""",
        SOFTCUDA_MEMORY="1000000",
    )


def test_memory_addresses_are_reused_after_all_others():
    """Device addresses of freed memory are reused after all other device addresses were used.

    The test limits the address space of the process. The range of device addresses is then small
    enough to be used up.
    """
    check(
        SETUP
        + """
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
addresses = []
while len(addresses) == len(set(addresses)) < 100:
    small = s.alloc(16)
    addresses.append(s.alloc(256 << 20))
    s.cuMemFree(small)
    s.cuMemFree(addresses[-1])
assert 10 < len(addresses) < 100, len(addresses)
assert "freed" in error_text(d.cuMemsetD8(addresses[-2], 0, 1), 1)
assert "ulimit -v" in error_text(d.cuMemAlloc(9 << 30), 2)
"""
    )


def test_setting_poison_fills_new_device_memory_with_nan():
    check("assert np.isnan(s.get(s.alloc(4096), 1024, np.float32)).all()", SOFTCUDA_POISON="1")


def test_setting_fail_makes_nth_call_fail():
    check(
        SETUP
        + """
s.cuMemFree(s.alloc(16))
assert "SOFTCUDA_FAIL" in error_text(d.cuMemAlloc(16), 2)
s.cuMemFree(s.alloc(16))
error_text(d.cuStreamCreate(1), 999)
s.stream()
""",
        SOFTCUDA_FAIL="cuMemAlloc:2,cuStreamCreate:1:999",
    )


def test_forked_child_gets_not_initialized():
    """In a child that was forked after cuInit, driver calls return NOT_INITIALIZED.

    Error names can still be queried. The parent process is not affected.
    """
    check(
        SETUP
        + """
child = os.fork()
if child == 0:
    codes = {int(r[0]) for r in (d.cuInit(0), d.cuMemAlloc(16), d.cuCtxSynchronize(),
                                 d.cuStreamCreate(1), d.cuMemGetInfo())}
    os._exit(0 if codes == {3} and d.cuGetErrorName(d.CUresult(3))[1] else 1)
assert os.waitpid(child, 0)[1] == 0
s.alloc(16)
"""
    )


def test_fault_is_detected_after_another_library_replaced_signal_handler():
    check(
        SETUP
        + """
import signal
signal.signal(signal.SIGSEGV, lambda *_: None)
s.launch(add, 1, 1, s.alloc(16) + 16, np.int32(1))
assert code(d.cuCtxSynchronize()) == "ILLEGAL_ADDRESS"
assert "'add'" in s.fault()
"""
    )


def test_kernel_printf_writes_to_stdout():
    output = check("s.run(kernels.say, 1, 2, np.int32(4))")
    assert output.splitlines() == ["thread 4 of block", "thread 5 of block"]


@pytest.mark.parametrize("setting", ["SOFTCUDA_WORKERS", "SOFTCUDA_MEMORY"])
def test_setting_that_is_no_number_is_ignored(setting):
    check("s.alloc(16)", **{setting: "many"})


def test_primary_context_flags_and_device_queries():
    """Flags of the primary context are stored. The only device is not a peer of itself."""
    check("""
flags, active = s.cuDevicePrimaryCtxGetState(0)
assert (flags, active) == (0, 1)
s.cuDevicePrimaryCtxSetFlags(0, 4)
assert s.cuCtxGetFlags() == 4 and s.cuDevicePrimaryCtxGetState(0)[0] == 4
assert code(d.cuDevicePrimaryCtxSetFlags(0, 256)) == "INVALID_VALUE"
assert s.cuDeviceCanAccessPeer(0, 0) == 0
assert s.cuDeviceGetPCIBusId(64, 0).partition(bytes(1))[0] == b"0000:00:00.0"
""")


def test_context_returns_limits_and_preferences(soft):
    """Limits, cache configuration and flags of the context are returned as they were set."""
    d = soft.d
    limits = d.CUlimit
    before = int(soft.cuCtxGetLimit(limits.CU_LIMIT_STACK_SIZE))
    soft.cuCtxSetLimit(limits.CU_LIMIT_STACK_SIZE, 4096)
    assert int(soft.cuCtxGetLimit(limits.CU_LIMIT_STACK_SIZE)) == 4096
    soft.cuCtxSetLimit(limits.CU_LIMIT_STACK_SIZE, before)
    prefer = d.CUfunc_cache.CU_FUNC_CACHE_PREFER_L1
    soft.cuCtxSetCacheConfig(prefer)
    assert soft.cuCtxGetCacheConfig() == prefer
    flags = int(soft.cuCtxGetFlags())
    soft.cuCtxSetFlags(4)
    assert int(soft.cuCtxGetFlags()) == 4
    soft.cuCtxSetFlags(flags)
    created = soft.cuCtxCreate(None, 0, 0)
    ids = {int(soft.cuCtxGetId(context)) for context in (soft.context, created)}
    assert len(ids) == 2
    soft.cuCtxDestroy(created)
    soft.cuCtxSetCurrent(soft.context)
