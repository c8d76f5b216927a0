"""Tests of child processes: results, exceptions, limits, replacement, reuse, fork and exit."""

from __future__ import annotations

import os
import random
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection

import pytest
from child_functions import Refused
from cudagraph_util import ChangingSet
from guide_util import output_of

from graft.grammar import GrammarSpec, GrammarUnavailableError
from graft.grammar.processes import POOL, call_error
from graft.models.errors import TemplateUnavailableError
from graft.models.text import chat
from graft.native.children import process as process_module
from graft.native.children import usage as usage_module
from graft.native.children.errors import ChildCrashed, ChildLost, ChildTimeout, ChildUnavailable
from graft.native.children.process import Call, ChildProcess, ProcessPool, Setup
from graft.native.children.usage import ProcessClock, TimeLimit
from graft.tools.serve.errors import to_api_error


@pytest.fixture
def child():
    child = ChildProcess()
    yield child
    child.close()


def test_child_process_returns_results_and_is_reused(child):
    assert child.call(Call("math:sqrt", (4.0,))) == 2.0
    first = child.call(Call("os:getpid", ()))
    assert first == child.call(Call("os:getpid", ())) != os.getpid()
    assert child.idle


def test_child_process_passes_refusals_on_by_type(child):
    """The parent process receives a `Refusal` of the same type and with the same message."""
    with pytest.raises(Refused, match=r"^the text is not JSON$") as caught:
        child.call(Call("child_functions:refuse", ("the text is not JSON",)))
    assert type(caught.value) is Refused
    assert child.idle  # the process continues


def test_child_process_reports_other_exceptions_as_lost(child):
    with pytest.raises(ChildLost, match=r"^ValueError: math domain error$") as caught:
        child.call(Call("math:sqrt", (-1.0,)))
    assert type(caught.value) is ChildLost
    with pytest.raises(ChildLost, match="ended with status 3"):
        child.call(Call("os:_exit", (3,)))
    assert child.call(Call("math:sqrt", (9.0,))) == 3.0  # in a new process


def test_calls_while_another_thread_creates_child_processes(child, monkeypatch):
    """Each call looks for dead processes among all child processes."""
    created = []
    children = ChangingSet([child], lambda: created.append(ChildProcess()))
    monkeypatch.setattr(process_module, "_children", children)
    assert child.call(Call("math:sqrt", (4.0,))) == 2.0
    children.changer.join()
    assert created[0] in children


def test_child_process_starts_no_threads_of_numpy(child):
    """With a thread per processor, NumPy would exhaust the memory limit on large machines."""
    assert child.call(Call("child_functions:threads_of_numpy", ())) == 1


def test_child_process_time_limit(child):
    child.call(Call("builtins:bool", ()))
    start = time.monotonic()
    with pytest.raises(ChildTimeout, match=r"took longer than 0\.1 s"):
        child.call(Call("time:sleep", (600,)), 0.1)
    assert time.monotonic() - start < 300
    assert not child.idle


def test_child_process_limit_of_several_calls(child):
    limit = TimeLimit(0.6)
    child.call(Call("time:sleep", (0.3,)), limit)
    assert 0.0 < limit.used_s < 0.6
    with pytest.raises(ChildTimeout, match=r"took longer than 0\.6 s"):
        child.call(Call("time:sleep", (600,)), limit)


@pytest.fixture
def busy_processor():
    """Yield the number of a processor that runs four endless processes, and the processes."""
    number = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, {{{number}}}); print(flush=True)\nwhile True: pass"
    command = [sys.executable, "-S", "-c", spin]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    for process in processes:
        process.stdout.readline()
    yield number, processes
    for process in processes:
        process.kill()
        process.communicate()


def test_process_clock_excludes_waiting_for_processor(busy_processor):
    """A process that shares a processor with three others uses about a quarter of the time."""
    _, processes = busy_processor
    clock = ProcessClock(processes[0].pid)
    start = time.monotonic()
    used_s = 0.0
    while time.monotonic() - start < 0.3:
        time.sleep(0.03)
        used_s += clock.sample()
    assert 0.0 < used_s < 0.6 * (time.monotonic() - start)


def test_child_process_limit_excludes_waiting_for_processor(child, busy_processor):
    number, _ = busy_processor
    os.sched_setaffinity(running_process_id(child), {number})
    limit = TimeLimit(60.0)
    start = time.monotonic()
    child.call(Call("builtins:sum", (range(1_500_000),)), limit)
    assert limit.used_s < 0.6 * (time.monotonic() - start)


def in_background(action, delay_s):
    thread = threading.Timer(delay_s, action)
    thread.start()
    return thread


def running_process_id(child: ChildProcess) -> int:
    return child.call(Call("os:getpid", ()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGSTOP])
@pytest.mark.parametrize("state", ["idle", "busy"])
@pytest.mark.full("idle-15", "busy-15", "idle-11", "busy-9")
def test_child_process_replaces_killed_or_stopped_process(child, number, state):
    pid = running_process_id(child)
    if state == "idle":
        os.kill(pid, number)
    else:
        in_background(lambda: os.kill(pid, number), 0.1)
    delay_s = 0.0 if state == "idle" else 0.4
    child.call(Call("time:sleep", (delay_s,)))
    assert running_process_id(child) != pid


def test_killed_idle_processes_do_not_stay_as_zombies(child):
    """The next call of any child process reaps the killed processes."""
    others = [ChildProcess() for _ in range(2)]
    pids = [running_process_id(other) for other in others]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    child.call(Call("builtins:bool", ()))
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []
    assert running_process_id(others[0]) != pids[0]
    for other in others:
        other.close()


def test_child_process_replaces_process_that_reads_no_data(child, monkeypatch):
    """If the process is stopped, sending a call that exceeds the socket's buffer would block."""
    monkeypatch.setattr(process_module, "_PIPE_TIMEOUT_S", 1)
    os.kill(running_process_id(child), signal.SIGSTOP)
    assert child.call(Call("builtins:len", (bytes(1 << 24),))) == 1 << 24


def stop_within_reply():
    """Make this process stop after it has sent the first bytes of its reply."""

    def send(connection, data):
        os.write(connection.fileno(), struct.pack("!i", len(data)) + data[:2])
        os.kill(os.getpid(), signal.SIGSTOP)

    Connection._send_bytes = send


def test_child_process_that_stops_within_a_reply_is_unavailable(child, monkeypatch):
    monkeypatch.setattr(process_module, "_PIPE_TIMEOUT_S", 1)
    monkeypatch.setattr(process_module, "_MAX_KILLS", 1)
    timer = in_background(child.close, 20.0)  # ends the call if it has no limit
    with pytest.raises(ChildUnavailable, match="the child process sent no data for 1 s"):
        child.call(Call(f"{__name__}:stop_within_reply", ()))
    timer.cancel()


def test_child_process_that_is_killed_repeatedly_is_unavailable(child, monkeypatch):
    kill = Call("os:kill", (0, signal.SIGKILL))  # 0: all processes of the group
    monkeypatch.setattr(subprocess.Popen, "__init__", in_own_group(subprocess.Popen.__init__))
    with pytest.raises(ChildUnavailable, match=r"killed by another process \(SIGKILL\)"):
        child.call(kill)
    assert child.call(Call("math:sqrt", (9.0,))) == 3.0


def in_own_group(start):
    def start_in_own_group(*arguments, **options):
        start(*arguments, **options, start_new_session=True)

    return start_in_own_group


def test_child_process_slow_start_is_unavailable(child, monkeypatch):
    monkeypatch.setattr(process_module, "_START_TIMEOUT_S", 0.001)
    with pytest.raises(ChildUnavailable, match=r"did not start within 0\.001 s"):
        child.call(Call("math:sqrt", (4.0,)))


def test_unavailable_child_processes_are_not_errors_of_the_grammar(monkeypatch):
    def fail(*_):
        raise ChildUnavailable("the child process did not start within 120 s")

    monkeypatch.setattr(ChildProcess, "call", fail)
    with pytest.raises(GrammarUnavailableError, match="regex: could not be compiled: the child"):
        GrammarSpec.regex("a").check()
    for error in (GrammarUnavailableError("a"), TemplateUnavailableError("a")):
        assert to_api_error(error).status == 503


@pytest.mark.parametrize("calls, kills", [(10, 2), pytest.param(500, 50, marks=pytest.mark.full)])
def test_killed_processes_do_not_fail_grammar_checks(calls, kills):
    """Processes are killed at random times, some of them while they check a grammar."""
    rng = random.Random(1)
    kill_before = set(rng.sample(range(calls), kills))
    for index in range(calls):
        killer = None
        if index in kill_before:
            GrammarSpec.regex("a").check()
            process = POOL._idle[-1]._process
            killer = in_background(process.kill, rng.choice([0.0, 0.0, 0.001, 0.003]))
        GrammarSpec.json_schema({"const": index}).check()
        if killer is not None:
            killer.join()


def test_child_process_memory_limit():
    child = ChildProcess(1 << 26)
    with pytest.raises(ChildLost, match=r"needs more than 0\.0625 GiB of memory"):
        child.call(Call("builtins:bytes", (1 << 27,)))
    child.close()


@pytest.mark.parametrize(
    "outcome", ["value", pytest.param("refused", marks=pytest.mark.full), "memory"]
)
def test_child_process_that_keeps_memory_is_replaced(monkeypatch, outcome):
    """The memory of a large grammar is returned to the system, however the call ended."""
    monkeypatch.setattr(process_module, "_MAX_RESIDENT_BYTES", 1 << 27)
    child = ChildProcess(1 << 28, preload=("child_functions",))
    pid = running_process_id(child)
    if outcome == "value":
        assert child.call(Call("child_functions:keep_memory", (1 << 27,))) == pid
    elif outcome == "refused":
        with pytest.raises(Refused, match="needs too much memory"):
            child.call(Call("child_functions:keep_memory", (1 << 27, True)))
    else:
        with pytest.raises(ChildLost, match=r"needs more than 0\.25 GiB of memory"):
            child.call(Call("child_functions:run_out_of_memory", ()))
    assert not child.idle and not os.path.exists(f"/proc/{pid}")
    assert child.call(Call("child_functions:keep_memory", (1 << 20,))) != pid
    assert child.idle
    child.close()


def test_child_process_crash_at_memory_limit_names_the_limit(monkeypatch):
    """A crash at the memory limit has the same message as an orderly refusal."""
    monkeypatch.setattr(process_module, "_MAX_CRASHES", 1)
    child = ChildProcess(1 << 27, preload=("child_functions",))
    running_process_id(child)
    with pytest.raises(ChildLost, match=r"^needs more than 0\.125 GiB of memory$"):
        child.call(Call("child_functions:crash_out_of_memory", ()))
    child.close()


def test_call_whose_processes_crash_is_unavailable(monkeypatch):
    """Another process may have sent the signal, so the call may be valid. It runs twice."""
    child = ChildProcess(preload=("child_functions",))
    starts = []
    spawn = process_module._spawn
    monkeypatch.setattr(process_module, "_spawn", lambda *a: starts.append(1) or spawn(*a))
    with pytest.raises(ChildCrashed, match="the child processes ended with SIGSEGV") as caught:
        child.call(Call("child_functions:crash", ()))
    assert isinstance(caught.value, ChildUnavailable) and len(starts) == 2
    assert type(call_error("regex", caught.value)) is GrammarUnavailableError
    assert child.call(Call("math:sqrt", (9.0,))) == 3.0
    child.close()


def test_child_process_limits_elapsed_time(child, busy_processor, monkeypatch):
    """A process that waits for a processor exceeds the limit of the elapsed time."""
    monkeypatch.setattr(usage_module, "_MIN_ELAPSED_S", 0.3)
    number, _ = busy_processor
    os.sched_setaffinity(running_process_id(child), {number})
    limit = TimeLimit(0.3)
    with pytest.raises(ChildLost, match=r"got no processor time|took longer than 0\.3 s"):
        child.call(Call("child_functions:spin", ()), limit)
    assert limit.used_s < 0.3 <= limit.elapsed_s


def test_child_process_runs_setup_once(child):
    setup = Setup("directory", "os:chdir", ("/",))
    assert child.call(Call("os:getcwd", (), setup)) == "/"
    child.call(Call("os:chdir", ("/tmp",)))
    assert child.call(Call("os:getcwd", (), setup)) == "/tmp"


def test_process_pool_reuses_idle_processes():
    pool = ProcessPool()
    first = pool.acquire()
    first_id = first.call(Call("os:getpid", ()))
    pool.release(first)
    assert pool.call(Call("os:getpid", ())) == first_id
    assert pool.acquire() is first
    pool.release(first)
    limited = pool.acquire(1 << 30)
    assert limited is not first
    pool.release(limited)  # the pool keeps only processes with the default memory limit
    assert pool.acquire() is first
    first.close()


def test_closed_child_process_raises_child_lost(child):
    child.start()
    child.close()
    with pytest.raises(ChildLost, match="the process was stopped"):
        child.call(Call("math:sqrt", (4.0,)))


def test_child_process_ends_after_interrupted_call(monkeypatch):
    """After Ctrl-C has interrupted a call, the next call must not receive the reply to it."""

    def interrupted(*_):
        raise KeyboardInterrupt

    child = ChildProcess()
    child.start()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ChildProcess, "_read", interrupted)
        child.call(Call("math:sqrt", (4.0,)))
    assert child.call(Call("math:sqrt", (9.0,))) == 3.0
    child.close()


def test_child_processes_import_little():
    """Importing NumPy or the CUDA bindings would double the time that child processes start."""
    for preload in (POOL._preload, chat._CHILD.preload):
        child = ChildProcess(preload=preload)
        imported = child.call(Call("child_functions:imported_packages", ()))
        assert imported & {"graft", "numpy", "cuda"} == {"graft"}
        child.close()


UNCLOSED = """
import atexit, os
def print_children():
    with open("/proc/self/task/%d/children" % os.getpid()) as file:
        print("left:", [pid for line in file for pid in line.split()])
atexit.register(print_children)  # runs last
from graft.grammar import GrammarService, GrammarSpec, Vocabulary
vocabulary = Vocabulary([bytes([b]) for b in range(256)] + [b""], 257, [256])
service = GrammarService(vocabulary, "auto")
service.submit(GrammarSpec.json_object()).result(300)
"""


@pytest.mark.parametrize("limit", [pytest.param(None, marks=pytest.mark.full), 16 << 30])
def test_child_processes_end_with_python(limit):
    """No child process remains after Python has exited, even if the address space is limited."""

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    assert output_of(UNCLOSED, preexec_fn=limited) == "left: []\n"


FORKED = """
import os, signal, sys
from graft.grammar import GrammarSpec
from graft.models.tokenizer import Tokenizer
from graft.tools.demo_model import demo_model
def use_children():
    GrammarSpec.json_schema({"type": "null"}).check()
    tokenizer.chat([{"role": "user", "content": "a"}])
tokenizer = Tokenizer(demo_model()[0])
use_children()
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    use_children()
    sys.exit(5)
status = os.waitpid(pid, 0)[1]
use_children()
print(os.waitstatus_to_exitcode(status))
"""


def test_child_processes_work_after_fork():
    """After a fork, the parent and the forked process use different child processes."""
    assert output_of(FORKED) == "5\n"
