"""graft doctor: what is there and what is missing; the lock-order detector; graft soft."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

from graft.cudagraph import chooser
from graft.cudagraph.errors import OptionError
from graft.tools import cli, doctor, watch


def test_a_complete_environment_is_healthy(capsys):
    """Where graft's tests can run, the doctor finds nothing missing and says so in JSON."""
    assert cli.main(["doctor", "--limit", "5"]) == 2
    assert "--limit goes with --watch" in capsys.readouterr().err
    assert cli.main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    found = {finding["name"]: finding for finding in said["findings"]}
    assert said["healthy"] is True
    for name in (
        "python",
        "packages",
        "native part",
        "compiler",
        "xgrammar",
        "llguidance",
        "tvm-ffi",
        "device",
    ):
        assert found[name]["status"] == "ok", found[name]
    assert "llguidance@1.9" in found["llguidance"]["detail"]


@pytest.mark.parametrize(
    ("package", "name", "status"),
    [
        ("xgrammar", "xgrammar", "absent"),
        ("llguidance", "llguidance", "missing"),
        ("apache-tvm-ffi", "tvm-ffi", "missing"),
        ("tokenizers", "packages", "missing"),
    ],
)
def test_a_missing_package_is_told_with_advice(package, name, status, monkeypatch, capsys):
    """A package that is not installed is reported with the command that installs it; graft does
    without XGrammar."""
    real = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda p: None if p == package else real(p))
    assert cli.main(["doctor"]) == (status == "missing")
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(name))
    assert status in lines[at]
    assert "pip install" in lines[at + 1] and package in lines[at + 1]


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [("CXX", "no-such-compiler", "compiler"), ("GRAFT_DEVICE", "abacus", "device")],
)
def test_what_the_environment_names_wrongly_is_missing(variable, value, name):
    """A compiler that is none, or a device: a finding and not a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "graft.tools.cli", "doctor", "--json"],
        text=True,
        capture_output=True,
        env={**os.environ, "GRAFT_DEVICE": "soft", variable: value},
    )
    assert done.returncode == 1 and done.stderr == ""
    found = {f["name"]: f for f in json.loads(done.stdout)["findings"]}
    assert found[name]["status"] == "missing" and value in found[name]["detail"]


def test_a_driver_that_hangs_is_reported(monkeypatch):
    """A driver that does not answer in time is a finding, not a hang."""
    monkeypatch.setattr(chooser, "PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor.chooser, "PROBE_LIMIT_S", 0.5)
    finding = doctor.check_driver()
    assert finding.status == "absent" and "no answer" in finding.detail


def test_a_gpu_without_cupy_is_not_healthy(monkeypatch):
    """Where NVIDIA's driver shows a device, CuPy is needed and its absence is missing."""
    gpu = doctor.Finding("nvidia driver", "ok", "CUDA 13.0, a device")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: gpu, doctor.check_cupy))
    monkeypatch.setattr(doctor, "version_of", lambda package: None)
    monkeypatch.delenv("GRAFT_DEVICE", raising=False)
    assert [finding.status for finding in doctor.examine()] == ["ok", "missing"]


LIMIT_S = 60
PRELUDE = """
import ctypes, sys, time
from graft.cudagraph.device import open_device
from graft.cudagraph.graph import Graph
from graft.cudagraph.hostwork import NativeWork, hostfunc
device = open_device()
stream = device.stream()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
held = ctypes.PyDLL("libcuda.so.1")
graph = Graph(device)
lane = graph.lane("main")

def replay(times):
    run = graph.instantiate()
    for _ in range(times):
        run.launch(stream)
        run.synchronize(60)

def a_call_that_keeps_the_gil():
    held.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))

def a_callback():
    sum(range(10))
"""


@pytest.fixture
def program(tmp_path):
    """Write a program of the prelude and this code; returns its path."""

    def write(code: str, prelude: str = PRELUDE) -> str:
        path = tmp_path / "program.py"
        path.write_text(prelude + textwrap.dedent(code))
        return str(path)

    return write


def test_both_orders_are_a_potential_deadlock(program, capfd):
    """A callback that asks for the GIL and a driver call that keeps it: exit status 3, stacks."""
    path = program("""
        for _ in range(3):
            hostfunc(stream, a_callback)
            stream.synchronize(60)
            a_call_that_keeps_the_gil()
        print("the program's own output")
    """)
    assert cli.main(["doctor", "--watch", "--json", path]) == watch.POTENTIAL
    out, err = capfd.readouterr()
    said = json.loads(out)
    assert "the program's own output" in err
    assert said["verdict"] == "potential" and said["cycle"] == ["driver lock"]
    (call,) = [edge for edge in said["edges"] if edge["holds"] == ["GIL"]]
    assert (call["at"], call["wants"], call["count"]) == ("cuMemGetInfo", ["driver lock"], 3)
    assert "a_call_that_keeps_the_gil" in call["python"][0] and path in call["python"][0]
    assert any("cuMemGetInfo" in frame for frame in call["native"])
    asks = [edge for edge in said["edges"] if edge["wants"] == ["GIL"]]
    assert sum(edge["count"] for edge in asks) == 3
    assert all(edge["holds"] == ["driver lock", "device work"] for edge in asks)
    assert any("a_callback" in frame for edge in asks for frame in edge["python"])
    assert all(any("PyGILState_Ensure" in f for f in edge["native"]) for edge in asks)


def test_slow_work_without_the_gil_is_no_alarm(program, capfd):
    """A native host function that takes its time asks for nothing; the program's status is told."""
    path = program("""
        usleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
        lane.host(NativeWork(usleep, 300_000))
        lane.mailbox(NativeWork(usleep, 100_000))
        run = graph.instantiate()
        run.launch(stream)
        for _ in range(50):
            a_call_that_keeps_the_gil()
        run.synchronize(60)
        sys.exit(7)
    """)
    assert cli.main(["doctor", "--watch", path]) == watch.FAILED
    said = capfd.readouterr().err
    assert "the program ended with status 7" in said
    assert "verdict: no cycle" in said and "-> GIL:" not in said and "50 x" in said


def test_callbacks_alone_are_no_cycle(program):
    """Python callbacks of every kind ask for the GIL; without a call that keeps it all is well."""
    report, status = watch.watch(
        [
            program("""
        lane.host(a_callback)
        lane.mailbox(a_callback)
        replay(3)
        data = device.zeros((8,), "int32")
        data.to_host()
        data.close()
    """)
        ],
        LIMIT_S,
    )
    assert status == 0 and report.verdict == "none" and report.processes == 1
    assert {tuple(edge.holds) for edge in report.edges} == {
        ("driver lock", "device work"),
        ("device work",),
    }
    assert all(edge.wants == ["GIL"] for edge in report.edges)


def test_a_worker_holds_the_devices_progress_and_no_lock(program):
    """A Python mailbox worker makes a cycle with a call that waits for the device, not with one
    that only takes a lock."""
    code = """
        lane.mailbox(a_callback)
        replay(1)
        a_call_that_keeps_the_gil()
    """
    assert watch.watch([program(code)], LIMIT_S)[0].verdict == "none"
    report, _ = watch.watch(
        [
            program(
                code
                + """
        held.cuStreamSynchronize(ctypes.c_void_p(stream.handle))
    """
            )
        ],
        LIMIT_S,
    )
    assert report.verdict == "potential" and report.cycle == ["device work"]


def test_a_program_without_graft_is_watched_and_told_though_it_is_killed(program):
    """cuda.bindings and ctypes alone meet the soft device; edges are known even after _exit."""
    report, status = watch.watch(
        [
            program(
                """
        import ctypes, os
        from cuda.bindings import driver as cu
        cu.cuInit(0)
        cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])
        def thunk(data):
            done.append(1)
        done = []
        keep = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(thunk)
        ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(None, keep, None)
        cu.cuCtxSynchronize()
        assert done
        def keeps_the_gil():
            ctypes.PyDLL("libcuda.so.1").cuCtxSynchronize()
        keeps_the_gil()
        os._exit(0)
    """,
                prelude="",
            )
        ],
        LIMIT_S,
    )
    assert status == 0 and report.verdict == "potential" and report.cycle == ["device work"]
    for place, asked in (("keeps_the_gil", "device work"), ("thunk", "GIL")):
        assert any(
            place in frame for edge in report.edges if asked in edge.wants for frame in edge.python
        )


def test_a_hang_is_told_with_both_sides(program, capfd):
    """A program that deadlocks is ended; the report has the edges and both sides' stacks."""
    path = program("""
        libc, gate = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        wait = ctypes.cast(libc.sem_wait, ctypes.c_void_p).value
        libc.sem_init(gate, 0, 0)
        held.softcuda_watch_asks.restype = ctypes.c_int64
        sys.setswitchinterval(1e6)
        hostfunc(stream, NativeWork(wait, ctypes.addressof(gate)))
        hostfunc(stream, a_callback)
        libc.sem_post(gate)  # from here on the GIL is not given up
        while not held.softcuda_watch_asks():  # the callback stands at the GIL
            libc.usleep(1000)
        def waits_with_the_gil():
            held.cuStreamSynchronize(ctypes.c_void_p(stream.handle))
        waits_with_the_gil()
    """)
    assert cli.main(["doctor", "--watch", "--limit", "2", path]) == watch.DEADLOCK
    said = capfd.readouterr().err
    report = said[said.index("the watchdog ended") :]
    assert "verdict: DEADLOCK" in report
    waiting, running = report.split("runs host function")
    assert "is in cuStreamSynchronize" in waiting and "in waits_with_the_gil" in waiting
    assert "cuStreamSynchronize+" in waiting and "PyGILState_Ensure+" in running


def test_the_switch_alone_writes_the_edges(program, tmp_path):
    """SOFTCUDA_WATCH=FILE needs no tool: any process that opens the soft device writes there."""
    path = tmp_path / "edges.jsonl"
    env = {**os.environ, "GRAFT_DEVICE": "soft", "SOFTCUDA_WATCH": str(path)}
    code = program("a_call_that_keeps_the_gil()")
    for _ in range(2):
        subprocess.run([sys.executable, code], env=env, check=True)
    report = watch.read(path)
    assert report.processes == 2 and report.verdict == "none"
    assert [edge.at for edge in report.edges] == ["cuMemGetInfo"] * 2


def test_what_cannot_be_watched_is_said(program, capfd, tmp_path):
    """No program, no such program, no device opened: exit status 2 and why."""
    for command in ([], ["no-such-program"], ["--limit", "5"], ["--limit", "soon", "-c", "0"]):
        assert cli.main(["doctor", "--watch", *command]) == 2
        assert re.search("no program|takes seconds", capfd.readouterr().err)
    assert cli.main(["doctor", "--watch", "-c", "print('hello')"]) == watch.UNSEEN
    assert "did not open the soft device" in capfd.readouterr().err
    with pytest.raises(OptionError, match="at least 1"):
        watch.watch(["-c", "0"], 0)


@pytest.mark.parametrize("status", [2, 3, 4])
def test_a_programs_own_status_is_no_verdict(status, program, capfd):
    """A program that ends with a status that stands for a verdict has failed, and it is told."""
    assert cli.main(["doctor", "--watch", program(f"sys.exit({status})")]) == watch.FAILED
    said = capfd.readouterr().err
    assert "verdict: no cycle" in said and f"ended with status {status}" in said


def test_the_launcher_runs_anything_on_the_soft_device(tmp_path):
    """``graft soft``: cuda.bindings finds it, arguments and status pass, pytest says the device."""
    (tmp_path / "test_it.py").write_text(
        "from cuda.bindings import driver\n"
        "def test_it():\n"
        "    assert driver.cuInit(0)[0] == 0\n"
        "    assert driver.cuDeviceGetName(64, 0)[1].startswith(b'graft soft device')\n"
    )
    soft = [sys.executable, "-m", "graft.tools.cli", "soft"]
    tested = subprocess.run(
        [*soft, "--", "-m", "pytest", "-p", "graft.tools.pytest_device", str(tmp_path), "-q"],
        capture_output=True,
        text=True,
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "cuda: graft's soft device, 0 kernels and 0 graphs" in tested.stdout
    said = subprocess.run([*soft, "--", "-c", "import sys; sys.exit(len(sys.argv))", "a", "b"])
    assert said.returncode == 3
    lacking = subprocess.run([*soft, "no-such-program"], capture_output=True, text=True)
    assert lacking.returncode == 2 and "no-such-program" in lacking.stderr
