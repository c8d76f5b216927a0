"""User objects, resource counters, lock models and the watchdog of the soft device."""

from __future__ import annotations

import pytest
from softcuda_util import check, run_child

#: Helpers for scripts in child processes. The destructor of a user object records the data of the
#: object, its thread, and the result of a driver call, which must be refused.
HELPERS = """
import os
destroyed, threads, calls = [], [], []
def destructor(data):
    threads.append(threading.get_native_id())
    calls.append(code(d.cuMemAlloc(16)))
    destroyed.append(data or 0)
destroy = CALLBACK(destructor)
flags = d.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
MOVE = d.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
def user_object(data, count=1):
    return s.cuUserObjectCreate(data, d.CUhostFn(address(destroy)), count, flags)
def graph_with_object(data):
    # return a graph definition that owns a user object
    g = s.cuGraphCreate(0)
    s.cuGraphRetainUserObject(g, user_object(data), 1, MOVE)
    return g
gate = threading.Event()
hold = CALLBACK(lambda _: gate.wait(10) and None)
def assert_destroyed(*expected, limit=20):
    end = time.monotonic() + limit
    while sorted(destroyed) != sorted(expected) and time.monotonic() < end:
        time.sleep(0.002)
    time.sleep(0.02)
    assert sorted(destroyed) == sorted(expected), (destroyed, expected)
"""


#: Scripts that check the lifetime of user objects. Each key states what its script checks.
USER_OBJECT_SCRIPTS = {
    "is destroyed with the last graph or executable": """
g = graph_with_object(1)
e = s.cuGraphInstantiate(g, 0)
# The second object is added after the instantiation, so the executable does not retain it.
late = user_object(2)
s.cuGraphRetainUserObject(g, late, 1, MOVE)
s.cuGraphDestroy(g)
assert_destroyed(2)
s.cuGraphExecDestroy(e)
assert_destroyed(1, 2)
assert s.live()["user_object"] == 0
assert set(calls) == {"NOT_PERMITTED"}
""",
    "retained without MOVE leaves the caller's references": """
g, o = s.cuGraphCreate(0), user_object(1, 2)
s.cuGraphRetainUserObject(g, o, 3, 0)
s.cuUserObjectRelease(o, 2)
assert_destroyed()
s.cuGraphReleaseUserObject(g, o, 2)
assert code(d.cuGraphReleaseUserObject(g, o, 2)) == "INVALID_VALUE"
assert_destroyed()
s.cuGraphReleaseUserObject(g, o, 1)
assert_destroyed(1)
assert code(d.cuUserObjectRelease(o, 1)) == "INVALID_HANDLE"
""",
    "replaced by an update is released after queued launches": """
a, b = graph_with_object(1), graph_with_object(2)
for g in (a, b): s.add_host(g, [], hold)
e, q = s.cuGraphInstantiate(a, 0), s.stream()
s.cuGraphLaunch(e, q)
s.cuGraphExecUpdate(e, b)
s.cuGraphDestroy(a)
s.cuGraphDestroy(b)
assert_destroyed()
gate.set()
s.cuStreamSynchronize(q)
assert_destroyed(1)
s.cuGraphExecDestroy(e)
assert_destroyed(1, 2)
""",
    "of a child graph is retained by the clone": """
child, g = graph_with_object(1), s.cuGraphCreate(0)
s.cuGraphAddEmptyNode(child, [], 0)
s.cuGraphAddChildGraphNode(g, [], 0, child)
s.cuGraphDestroy(child)
e = s.cuGraphInstantiate(g, 0)
s.cuGraphDestroy(g)
assert_destroyed()
s.cuGraphExecDestroy(e)
assert_destroyed(1)
assert s.live()["graph"] == 0
""",
    "is destroyed inline or on another thread": """
s.cuUserObjectRelease(user_object(1), 1)
assert_destroyed(1)
inline = os.environ["SOFTCUDA_DESTRUCTORS"] == "inline"
assert (threads[0] == threading.get_native_id()) is inline
""",
}


@pytest.mark.parametrize("mode", ["late", "inline"])
@pytest.mark.parametrize("name", USER_OBJECT_SCRIPTS)
def test_user_object(name, mode):
    """Run one script about user objects with late destructors and with inline destructors."""
    check(HELPERS + USER_OBJECT_SCRIPTS[name], SOFTCUDA_DESTRUCTORS=mode)


def test_counters_of_live_resources_return_to_zero():
    """After all objects were destroyed, no resource counts as live or leaked."""
    check(
        HELPERS
        + """
own = s.kernels('extern "C" __global__ void f(int* p) { *p += 1; }')
p, q, event, g = s.ints(0), s.stream(), s.cuEventCreate(0), graph_with_object(1)
host = s.cuMemHostAlloc(100, 3)
s.add_kernel(g, [], own.f, 1, 1, p)
e = s.cuGraphInstantiate(g, 0)
live = s.live()
assert live == dict(device_memory=1, pinned_memory=1, stream=1, event=1, module=1, graph=1,
                    graph_exec=1, user_object=1, context=1), live
s.play(e, q, 5)
s.close()
assert_destroyed(1)
deadline = time.monotonic() + 10  # the counter decreases after the destructor has returned
while s.live()["user_object"] and time.monotonic() < deadline:
    time.sleep(0.001)
assert d.cuDevicePrimaryCtxRelease(0)[0] == 0
assert set(s.live().values()) == set(s.leaked().values()) == {0}, s.live()
assert code(d.cuDevicePrimaryCtxRelease(0)) == "INVALID_CONTEXT"
"""
    )


def test_log_lists_resources_not_freed_at_exit():
    done = run_child("s.alloc(64); s.alloc(64); s.stream()", SOFTCUDA_LOG="1")
    assert done.returncode == 0
    assert "softcuda: not freed at exit: device_memory 2, stream 1" in done.stderr


#: Script in which a host function that needs the GIL runs during a driver call. DRIVER_CALL is
#: replaced by the call.
CALL_DURING_HOST_FUNCTION = """
f = s.kernels('extern "C" __global__ void f(int* p) { *p += 1; }').f
table, values = s.pack(s.ints(0))
started = threading.Event()
def body(_):
    started.set()
    time.sleep(0.3)  # releases the GIL and requests it again
hold, q = CALLBACK(body), s.stream()
holding_gil = ctypes.PyDLL(s.lib._name)   # calls through PyDLL do not release the GIL
word = ctypes.c_uint64
s.host(q, hold)
started.wait(20)
DRIVER_CALL
s.cuCtxSynchronize()
print("done")
"""
#: Driver calls by name: (Python code of the call, function that the watchdog's report names). The
#: call "released" releases the GIL, so it does not deadlock and is not in a report.
CALLS = {
    "alloc": ("holding_gil.cuMemAlloc_v2(ctypes.byref(word()), word(16))", "cuMemAlloc"),
    "hostfunc": (
        "holding_gil.cuLaunchHostFunc_v2(word(int(q)), word(address(USLEEP)), None, 0)",
        "cuLaunchHostFunc",
    ),
    "launch": (
        "holding_gil.cuLaunchKernel(word(int(f)), 1, 1, 1, 1, 1, 1, 0, None, "
        "word(table.ctypes.data), None)",
        "cuLaunchKernel",
    ),
    "released": ("s.cuMemAlloc(16)", ""),
}


@pytest.mark.parametrize(
    ("model", "name", "deadlock"),
    [
        (0, "alloc", False),
        (0, "hostfunc", False),
        (0, "launch", False),
        (1, "alloc", True),
        (1, "hostfunc", True),
        (1, "launch", True),
        (1, "released", False),
        (2, "alloc", False),
        (2, "hostfunc", True),
        (2, "launch", False),
        (4, "alloc", False),
        (4, "launch", True),
    ],
)
@pytest.mark.full("[0-hostfunc", "[0-launch", "[1-hostfunc", "[2-launch", "[4-alloc")
def test_lock_model_reproduces_gil_deadlock(model, name, deadlock):
    """With a lock model, a driver call that holds the GIL deadlocks with a Python host function.

    The call waits for the host function, and the host function waits for the GIL. The watchdog
    terminates the process, and its report names both threads.
    """
    call, api = CALLS[name]
    done = run_child(
        CALL_DURING_HOST_FUNCTION.replace("DRIVER_CALL", call),
        SOFTCUDA_LOCK_MODEL=str(model),
        SOFTCUDA_WATCHDOG="1" if deadlock else "20",
    )
    if not deadlock:
        assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
        return
    assert done.returncode == 86, (done.stdout, done.stderr)
    lines = done.stderr.splitlines()
    (blocked,) = [line for line in lines if f"is in {api}" in line]
    assert "GIL HELD" in blocked and f"lock model {model}" in blocked
    (running,) = [line for line in lines if "runs host function" in line]
    assert ("holding the context lock" in running) is (model == 1)


def test_describe_lists_calls_in_progress():
    """softcuda_describe() lists the calls in progress and the running host function.

    The text states for which object each call waits. It is empty if no call is in progress.
    """
    out = check("""
libc = ctypes.CDLL(None)
gate = ctypes.create_string_buffer(64)
assert libc.sem_init(gate, 0, 0) == 0
q = s.stream()
s.host(q, libc.sem_wait, ctypes.addressof(gate))
waiter = threading.Thread(target=d.cuStreamSynchronize, args=(q,))
waiter.start()
end = time.monotonic() + 20
while "cuStreamSynchronize" not in s.describe() or "host function" not in s.describe():
    assert time.monotonic() < end, s.describe()
    time.sleep(0.002)
print(s.describe())
libc.sem_post(gate)
waiter.join()
s.cuCtxSynchronize()
assert s.describe() == ""
""")
    assert "is in cuStreamSynchronize" in out and "runs host function sem_wait" in out
    assert "GIL not held, waiting for cuStreamSynchronize: the stream's work" in out
