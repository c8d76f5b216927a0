"""Tests of child processes: results, exceptions, limits, reuse, fork and exit."""

from __future__ import annotations

import os
import resource
import time

import pytest
from guide_util import output_of

from graft.grammar import GrammarError
from graft.native.children.errors import ChildLost, ChildTimeout, Refusal
from graft.native.children.process import Call, ChildProcess, ProcessPool, Setup


@pytest.fixture
def child():
    child = ChildProcess(preload=("graft.grammar",))
    yield child
    child.close()


def test_child_process_returns_results_and_is_reused(child):
    assert child.call(Call("math:sqrt", (4.0,))) == 2.0
    first = child.call(Call("os:getpid", ()))
    assert first == child.call(Call("os:getpid", ())) != os.getpid()
    assert child.idle


def test_child_process_passes_refusals_on_by_type(child):
    """The parent process receives a `Refusal` of the same type and with the same message."""
    invalid = Call("graft.grammar.spec:parse_json", ("text", "{"))
    with pytest.raises(GrammarError, match="text: the text is not JSON") as caught:
        child.call(invalid)
    assert type(caught.value) is GrammarError and isinstance(caught.value, Refusal)
    assert child.idle  # the process continues


def test_child_process_reports_other_exceptions_as_lost(child):
    with pytest.raises(ChildLost, match=r"^ValueError: math domain error$") as caught:
        child.call(Call("math:sqrt", (-1.0,)))
    assert type(caught.value) is ChildLost
    with pytest.raises(ChildLost, match="ended with status 3"):
        child.call(Call("os:_exit", (3,)))
    assert child.call(Call("math:sqrt", (9.0,))) == 3.0  # in a new process


def test_child_process_time_limit(child):
    child.call(Call("builtins:bool", ()))
    start = time.monotonic()
    with pytest.raises(ChildTimeout, match=r"took longer than 0\.1 s"):
        child.call(Call("time:sleep", (600,)), 0.1)
    assert time.monotonic() - start < 300
    assert not child.idle


def test_child_process_memory_limit():
    child = ChildProcess(1 << 26)
    with pytest.raises(ChildLost, match=r"needs more than 0\.0625 GiB of memory"):
        child.call(Call("builtins:bytes", (1 << 27,)))
    child.close()


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


@pytest.mark.parametrize("limit", [None, 16 << 30])
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
