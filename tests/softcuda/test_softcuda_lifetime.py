"""Who keeps what alive on the soft device: user objects, counters, lock models, the watchdog."""

from __future__ import annotations

import pytest
from softcuda_util import check, run_child

HELPERS = """
import os
gone, where, calls = [], [], []
def destroyed(data):
    where.append(threading.get_native_id())
    calls.append(code(d.cuMemAlloc(16)))
    gone.append(data or 0)
destroy = CALLBACK(destroyed)
flags = d.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
MOVE = d.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
def user_object(data, count=1):
    return s.cuUserObjectCreate(data, d.CUhostFn(address(destroy)), count, flags)
def holder(data):
    # a definition that holds a user object
    g = s.cuGraphCreate(0)
    s.cuGraphRetainUserObject(g, user_object(data), 1, MOVE)
    return g
gate = threading.Event()
hold = CALLBACK(lambda _: gate.wait(10) and None)
def eventually(*wanted, limit=20):
    end = time.monotonic() + limit
    while sorted(gone) != sorted(wanted) and time.monotonic() < end:
        time.sleep(0.002)
    time.sleep(0.02)
    assert sorted(gone) == sorted(wanted), (gone, wanted)
"""


#: What happens to user objects, by scripts that prove it.
STORIES = {
    "A user object lives until the last graph or executable that holds it is gone": """
g = holder(1)
e = s.cuGraphInstantiate(g, 0)
late = user_object(2)                      # retained after the instantiation: not the exec's
s.cuGraphRetainUserObject(g, late, 1, MOVE)
s.cuGraphDestroy(g)
eventually(2)
s.cuGraphExecDestroy(e)
eventually(1, 2)
assert s.live()["user_object"] == 0
assert set(calls) == {"NOT_PERMITTED"}
""",
    "Retaining without MOVE keeps the caller's reference; over-release is refused": """
g, o = s.cuGraphCreate(0), user_object(1, 2)
s.cuGraphRetainUserObject(g, o, 3, 0)
s.cuUserObjectRelease(o, 2)
eventually()
s.cuGraphReleaseUserObject(g, o, 2)
assert code(d.cuGraphReleaseUserObject(g, o, 2)) == "INVALID_VALUE"
eventually()
s.cuGraphReleaseUserObject(g, o, 1)
eventually(1)
assert code(d.cuUserObjectRelease(o, 1)) == "INVALID_HANDLE"
""",
    "After cuGraphExecUpdate the old references live until launches queued before have ended": """
a, b = holder(1), holder(2)
for g in (a, b): s.add_host(g, [], hold)
e, q = s.cuGraphInstantiate(a, 0), s.stream()
s.cuGraphLaunch(e, q)
s.cuGraphExecUpdate(e, b)
s.cuGraphDestroy(a)
s.cuGraphDestroy(b)
eventually()
gate.set()
s.cuStreamSynchronize(q)
eventually(1)
s.cuGraphExecDestroy(e)
eventually(1, 2)
""",
    "References of a child graph follow the copy inside its parent": """
child, g = holder(1), s.cuGraphCreate(0)
s.cuGraphAddEmptyNode(child, [], 0)
s.cuGraphAddChildGraphNode(g, [], 0, child)
s.cuGraphDestroy(child)
e = s.cuGraphInstantiate(g, 0)
s.cuGraphDestroy(g)
eventually()
s.cuGraphExecDestroy(e)
eventually(1)
assert s.live()["graph"] == 0
""",
    "Inline destructors run in the destroying call, late ones on another thread": """
s.cuUserObjectRelease(user_object(1), 1)
eventually(1)
inline = os.environ["SOFTCUDA_DESTRUCTORS"] == "inline"
assert (where[0] == threading.get_native_id()) is inline
""",
}


@pytest.mark.parametrize("mode", ["late", "inline"])
@pytest.mark.parametrize("name", STORIES)
def test_user_objects(name, mode):
    """What the name says, in a process of its own, with either kind of destructors."""
    check(HELPERS + STORIES[name], SOFTCUDA_DESTRUCTORS=mode)


def test_counters_return_to_zero():
    """After everything is closed every counter of live resources is zero and nothing leaked."""
    check(
        HELPERS
        + """
own = s.kernels('extern "C" __global__ void f(int* p) { *p += 1; }')
p, q, event, g = s.ints(0), s.stream(), s.cuEventCreate(0), holder(1)
host = s.cuMemHostAlloc(100, 3)
s.add_kernel(g, [], own.f, 1, 1, p)
e = s.cuGraphInstantiate(g, 0)
live = s.live()
assert live == dict(device_memory=1, pinned_memory=1, stream=1, event=1, module=1, graph=1,
                    graph_exec=1, user_object=1, context=1), live
s.play(e, q, 5)
s.close()
eventually(1)
deadline = time.monotonic() + 10  # the object is counted out after its destructor returned
while s.live()["user_object"] and time.monotonic() < deadline:
    time.sleep(0.001)
assert d.cuDevicePrimaryCtxRelease(0)[0] == 0
assert set(s.live().values()) == set(s.leaked().values()) == {0}, s.live()
assert code(d.cuDevicePrimaryCtxRelease(0)) == "INVALID_CONTEXT"
"""
    )


def test_what_is_left_at_exit_is_named():
    """With the log on, a process that closes nothing says at its end what it left."""
    done = run_child("s.alloc(64); s.alloc(64); s.stream()", SOFTCUDA_LOG="1")
    said = "softcuda: not freed at exit: device_memory 2, stream 1"
    assert done.returncode == 0 and said in done.stderr


HOSTAGE = """
f = s.kernels('extern "C" __global__ void f(int* p) { *p += 1; }').f
table, values = s.pack(s.ints(0))
started = threading.Event()
def body(_):
    started.set()
    time.sleep(0.3)     # gives the GIL up and needs it again
hold, q = CALLBACK(body), s.stream()
keeping = ctypes.PyDLL(s.lib._name)   # a caller that forgets to release the GIL
word = ctypes.c_uint64
s.host(q, hold)
started.wait(20)
IT_CALLS
s.cuCtxSynchronize()
print("done")
"""
#: By name: how the driver is called, and how it calls itself.
HELD = {
    "alloc": ("keeping.cuMemAlloc_v2(ctypes.byref(word()), word(16))", "cuMemAlloc"),
    "hostfunc": (
        "keeping.cuLaunchHostFunc_v2(word(int(q)), word(address(USLEEP)), None, 0)",
        "cuLaunchHostFunc",
    ),
    "launch": (
        "keeping.cuLaunchKernel(word(int(f)), 1, 1, 1, 1, 1, 1, 0, None, "
        "word(table.ctypes.data), None)",
        "cuLaunchKernel",
    ),
    "released": ("s.cuMemAlloc(16)", ""),
}


@pytest.mark.parametrize(
    ("model", "what", "stuck"),
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
def test_lock_models_reproduce_the_gil_deadlocks(model, what, stuck):
    """Holding the GIL in a call that a lock model blocks deadlocks; the watchdog names both."""
    call, api = HELD[what]
    done = run_child(
        HOSTAGE.replace("IT_CALLS", call),
        SOFTCUDA_LOCK_MODEL=str(model),
        SOFTCUDA_WATCHDOG="1" if stuck else "20",
    )
    if not stuck:
        assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
        return
    assert done.returncode == 86, (done.stdout, done.stderr)
    lines = done.stderr.splitlines()
    (blocked,) = [line for line in lines if f"is in {api}" in line]
    assert "GIL HELD" in blocked and f"lock model {model}" in blocked
    (running,) = [line for line in lines if "runs host function" in line]
    assert ("holding the context lock" in running) is (model == 1)


def test_description_of_calls_in_progress():
    """softcuda_describe lists waiting calls with what they wait for, and the host function."""
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
