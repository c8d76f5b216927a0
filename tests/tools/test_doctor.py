"""Tests of ``graft doctor``, its lock-order detector (``--watch``), and ``graft soft``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from graft.cudagraph.driver import chooser
from graft.cudagraph.errors import OptionError
from graft.tools import cli, doctor, lock_order, soft


def test_doctor_reports_healthy_environment(capsys):
    """In the environment of the tests, ``graft doctor --json`` finds all required components."""
    assert cli.main(["doctor", "--limit", "5"]) == 2
    assert "--limit requires --watch" in capsys.readouterr().err
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert report["healthy"] is True
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
        ("apache-tvm-ffi", "tvm-ffi", "absent"),
        ("tokenizers", "packages", "missing"),
    ],
)
def test_doctor_reports_missing_package_with_install_command(
    package, name, status, monkeypatch, capsys
):
    """The report suggests the command that installs a missing package.

    The exit status is 1 if graft requires the package, and 0 if it is optional, like XGrammar.
    """
    real = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda p: None if p == package else real(p))
    assert cli.main(["doctor"]) == (status == "missing")
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(name))
    assert status in lines[at]
    assert "pip install" in lines[at + 1] and package in lines[at + 1]


def test_doctor_reports_invalid_environment_variables():
    """The report contains invalid values of CXX and GRAFT_DEVICE. No traceback is printed."""
    done = subprocess.run(
        [sys.executable, "-m", "graft.tools.cli", "doctor", "--json"],
        text=True,
        capture_output=True,
        env={**os.environ, "CXX": "no-such-compiler", "GRAFT_DEVICE": "abacus"},
    )
    assert done.returncode == 1 and done.stderr == ""
    found = {f["name"]: f for f in json.loads(done.stdout)["findings"]}
    for name, value in (("compiler", "no-such-compiler"), ("device", "abacus")):
        assert found[name]["status"] == "missing" and value in found[name]["detail"]


def test_doctor_reports_driver_that_hangs(monkeypatch):
    """A driver that does not answer within the time limit is reported as absent."""
    monkeypatch.setattr(chooser, "PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor.chooser, "PROBE_LIMIT_S", 0.5)
    finding = doctor.check_driver()
    assert finding.status == "absent" and "no answer" in finding.detail


@pytest.mark.parametrize(
    ("release", "wsl"), [("5.15.167.4-microsoft-standard-WSL2", True), ("6.8.0-45-generic", False)]
)
def test_doctor_names_wsl2(release, wsl, monkeypatch):
    monkeypatch.setattr(doctor.platform, "release", lambda: release)
    monkeypatch.setattr(doctor.chooser, "probe_cuda", lambda: ({"devices": ["a GPU"]}, ""))
    assert ("on WSL2" in doctor.check_driver().detail) == wsl
    monkeypatch.setattr(doctor.chooser, "probe_cuda", lambda: ({}, "no driver"))
    assert ("for Windows" in doctor.check_driver().advice) == wsl


#: Program that runs before the test of the GPU's compiler. It makes the soft device compile kernels
#: as a GPU does. CuPy and NVRTC are replaced by the modules that are inserted.
SIMULATED_GPU = """
import contextlib, sys
from types import SimpleNamespace
from graft.cudagraph.kernels import compiler, kernels
compiler._compile_with_nvrtc = lambda source, target: compiler.compile_cpu(
    source.text, source.name, cache_dir=compiler.cache_folder() / "soft")
kernels.compile_source = compiler._compile_cuda
"""
NO_CUPY = "sys.modules['cupy'] = None\n"
NO_NVRTC = "sys.modules['cuda.bindings.nvrtc'] = None\n"
HAS_NVRTC = "compiler.missing_compiler = lambda: ''\n"
BROKEN_CUPY = """
class RawModule:
    def __init__(self, **options):
        raise RuntimeError("libnvrtc.so.13 is missing\\nUse ...")
sys.modules["cupy"] = SimpleNamespace(
    RawModule=RawModule, cuda=SimpleNamespace(Device=lambda ordinal: contextlib.nullcontext()))
"""
WORKING_CUPY = """
compiler.cupy_problem = lambda ordinal: ""
compiler._compile_with_cupy = lambda context, source: compiler._compile_soft(source)
"""


@pytest.mark.parametrize(
    ("modules", "status", "detail"),
    [
        (WORKING_CUPY, "ok", "CuPy compiles and loads a kernel"),
        (NO_CUPY + HAS_NVRTC, "absent", "NVRTC without CuPy works; CuPy is not installed"),
        (
            BROKEN_CUPY + HAS_NVRTC,
            "absent",
            "CuPy cannot compile a kernel (RuntimeError: libnvrtc.so.13 is missing)",
        ),
        (BROKEN_CUPY + NO_NVRTC, "missing", "NVRTC cannot be loaded"),
        (NO_CUPY + NO_NVRTC, "missing", "CuPy is not installed; NVRTC cannot be loaded"),
    ],
    ids=["cupy", "no cupy", "broken cupy", "broken cupy, no nvrtc", "nothing"],
)
@pytest.mark.full("[no cupy]", "[broken cupy]")
def test_doctor_compiles_a_kernel_with_gpu(modules, status, detail, monkeypatch):
    monkeypatch.delenv("GRAFT_DEVICE", raising=False)
    monkeypatch.setattr(chooser, "probe_cuda", lambda: ({"devices": ["a GPU"]}, ""))
    program = SIMULATED_GPU + modules + doctor.KERNEL_TEST.replace('"cuda"', '"soft"')
    monkeypatch.setattr(doctor, "KERNEL_TEST", program)
    finding = doctor.check_gpu_compiler()
    assert finding.status == status, finding
    assert detail in finding.detail
    assert "[ctk]" in (finding.advice or "[ctk]")


def test_doctor_prints_findings_as_found(monkeypatch, capsys):
    """A check that hangs or crashes does not hide the findings before it."""

    def crash():
        assert capsys.readouterr().out.startswith("python ")
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_python, crash))
    with pytest.raises(KeyboardInterrupt):
        doctor.run(cli.parser().parse_args(["doctor"]))


def test_probe_ends_grandchildren_after_its_limit(tmp_path):
    program = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
child.wait()
"""
    limit_s = 1
    (tmp_path / "pid").touch()
    while not (tmp_path / "pid").read_text():  # on a busy machine, the processes start slowly
        found = chooser.run_python_child("-c", program, limit_s=limit_s)
        assert found == ("", f"no answer within {limit_s} s")
        limit_s *= 4
    grandchild = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    with contextlib.suppress(OSError):  # the process has ended
        while grandchild.read_text().split()[2] != "Z":
            time.sleep(0.01)


LIMIT_S = 60
PRELUDE = """
import ctypes, sys, time
from graft.cudagraph.device import open_device
from graft.cudagraph.graph.graph import Graph
from graft.cudagraph.host.hostwork import NativeWork, hostfunc
device = open_device()
stream = device.stream()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
holding_gil = ctypes.PyDLL("libcuda.so.1")  # calls through it keep the GIL
graph = Graph(device)
lane = graph.lane("main")

def replay(times):
    run = graph.instantiate()
    for _ in range(times):
        run.launch(stream)
        run.synchronize(60)

def call_holding_gil():
    holding_gil.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))

def callback():
    sum(range(10))
"""


@pytest.fixture
def program(tmp_path):
    """Return a function that writes a program to a file and returns the path of the file.

    The program is `prelude` followed by `code`.
    """

    def write(code: str, prelude: str = PRELUDE) -> str:
        path = tmp_path / "program.py"
        path.write_text(prelude + textwrap.dedent(code))
        return str(path)

    return write


def test_watch_reports_potential_deadlock(program, capfd):
    """A potential deadlock is found even if the program does not hang.

    The program has a callback that requests the GIL, and a driver call made with the GIL held. The
    report contains the stacks of the callback and of the driver call.
    """
    path = program("""
        for _ in range(3):
            hostfunc(stream, callback)
            stream.synchronize(60)
            call_holding_gil()
        print("the program's own output")
    """)
    assert cli.main(["doctor", "--watch", "--json", path]) == lock_order.POTENTIAL
    out, err = capfd.readouterr()
    report = json.loads(out)
    assert "the program's own output" in err
    assert report["verdict"] == "potential"
    assert report["cycle"] == ["driver lock"]
    (call,) = [edge for edge in report["edges"] if edge["holds"] == ["GIL"]]
    assert (call["at"], call["wants"], call["count"]) == ("cuMemGetInfo", ["driver lock"], 3)
    assert "call_holding_gil" in call["python"][0] and path in call["python"][0]
    assert any("cuMemGetInfo" in frame for frame in call["native"])
    requests = [edge for edge in report["edges"] if edge["wants"] == ["GIL"]]
    assert sum(edge["count"] for edge in requests) == 3
    for edge in requests:
        assert edge["holds"] == ["driver lock", "device work"]
        assert any("PyGILState_Ensure" in frame for frame in edge["native"])
    assert any("callback" in frame for edge in requests for frame in edge["python"])


def test_watch_ignores_slow_native_host_functions(program, capfd):
    """A native host function is not recorded, even if it runs long, unless it requests the GIL.

    The report contains the exit status of the program, also if it is one of the tool's own.
    """
    path = program("""
        usleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
        lane.host(NativeWork(usleep, 300_000))
        lane.mailbox(NativeWork(usleep, 100_000))
        run = graph.instantiate()
        run.launch(stream)
        for _ in range(50):
            call_holding_gil()
        run.synchronize(60)
        sys.exit(2)
    """)
    assert cli.main(["doctor", "--watch", path]) == lock_order.FAILED
    text = capfd.readouterr().err
    assert "the program ended with status 2" in text
    assert "verdict: no cycle" in text
    assert "-> GIL:" not in text
    assert "50 x" in text


def test_watch_finds_no_cycle_with_python_callbacks_alone(program):
    """Python callbacks request the GIL. There is no cycle, because no driver call holds the GIL."""
    path = program("""
        lane.host(callback)
        lane.mailbox(callback)
        replay(3)
        data = device.zeros((8,), "int32")
        data.to_host()
        data.close()
    """)
    report, status = lock_order.run_watched([path], LIMIT_S)
    assert status == 0
    assert report.verdict == "none"
    assert report.processes == 1
    assert {tuple(edge.holds) for edge in report.edges} == {
        ("driver lock", "device work"),
        ("device work",),
    }
    assert all(edge.wants == ["GIL"] for edge in report.edges)


def test_watch_mailbox_worker_holds_device_work_only(program):
    """The device waits for a mailbox worker (a host thread), which holds no lock of the driver.

    If the worker runs a Python function, the worker requests the GIL. This forms a cycle with a
    driver call that holds the GIL and waits for the device. It does not form a cycle with a driver
    call that holds the GIL and only takes a lock of the driver.
    """
    code = """
        lane.mailbox(callback)
        replay(1)
        call_holding_gil()
    """
    report, _ = lock_order.run_watched([program(code)], LIMIT_S)
    assert report.verdict == "none"
    wait = """
        holding_gil.cuStreamSynchronize(ctypes.c_void_p(stream.handle))
    """
    report, _ = lock_order.run_watched([program(code + wait)], LIMIT_S)
    assert report.verdict == "potential"
    assert report.cycle == ["device work"]


PROGRAM_WITHOUT_GRAFT = """
        import ctypes, os
        from cuda.bindings import driver as cu
        cu.cuInit(0)
        cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])
        def host_function(data):
            done.append(1)
        done = []
        keep = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(host_function)
        ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(None, keep, None)
        cu.cuCtxSynchronize()
        assert done
        def synchronize_holding_gil():
            ctypes.PyDLL("libcuda.so.1").cuCtxSynchronize()
        synchronize_holding_gil()
        os._exit(0)
"""


def test_watch_works_without_graft_and_after_exit(program):
    """A deadlock is found in a program that uses cuda.bindings and ctypes in place of graft.

    The edges are recorded although the program exits with ``os._exit``.
    """
    path = program(PROGRAM_WITHOUT_GRAFT, prelude="")
    report, status = lock_order.run_watched([path], LIMIT_S)
    assert status == 0
    assert report.verdict == "potential"
    assert report.cycle == ["device work"]
    for function, resource in (
        ("synchronize_holding_gil", "device work"),
        ("host_function", "GIL"),
    ):
        edges = [edge for edge in report.edges if resource in edge.wants]
        assert any(function in frame for edge in edges for frame in edge.python)


def test_watch_reports_deadlock_with_stacks_of_both_threads(program, capfd):
    """The watchdog terminates a program that deadlocks."""
    path = program("""
        libc, gate = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        wait = ctypes.cast(libc.sem_wait, ctypes.c_void_p).value
        libc.sem_init(gate, 0, 0)
        holding_gil.softcuda_gil_requests.restype = ctypes.c_int64
        sys.setswitchinterval(1e6)
        hostfunc(stream, NativeWork(wait, ctypes.addressof(gate)))
        hostfunc(stream, callback)
        libc.sem_post(gate)  # this thread keeps the GIL from here on
        while not holding_gil.softcuda_gil_requests():  # until the callback requests the GIL
            libc.usleep(1000)
        def synchronize_holding_gil():
            holding_gil.cuStreamSynchronize(ctypes.c_void_p(stream.handle))
        synchronize_holding_gil()
    """)
    assert cli.main(["doctor", "--watch", "--limit", "2", path]) == lock_order.DEADLOCK
    text = capfd.readouterr().err
    report = text[text.index("the watchdog ended") :]
    assert "verdict: DEADLOCK" in report
    waiting, running = report.split("runs host function")
    assert "is in cuStreamSynchronize" in waiting
    assert "in synchronize_holding_gil" in waiting
    assert "cuStreamSynchronize+" in waiting
    assert "PyGILState_Ensure+" in running


def test_watch_variable_records_edges_without_the_tool(program, tmp_path):
    """If SOFTCUDA_WATCH names a file, each process that opens the soft device appends its edges."""
    path = tmp_path / "edges.jsonl"
    code = program(
        """
        import ctypes
        driver = ctypes.PyDLL("libcuda.so.1")
        context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        assert driver.cuInit(0) == 0
        assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert driver.cuCtxSetCurrent(context) == 0
        assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
        """,
        prelude="",
    )
    env = {**soft.soft_environment(), "SOFTCUDA_WATCH": str(path)}
    for _ in range(2):
        subprocess.run([sys.executable, code], env=env, check=True)
    report = lock_order.read_report(path)
    assert report.processes == 2 and report.verdict == "none"
    assert [edge.at for edge in report.edges] == ["cuMemGetInfo"] * 2


def test_watch_rejects_invalid_commands(program, capfd, tmp_path):
    """If the program is missing or does not exist, or --limit is invalid, the exit status is 2.

    If the program does not open the soft device, the exit status is `lock_order.UNSEEN`.
    """
    for command in ([], ["no-such-program"], ["--limit", "5"], ["--limit", "soon", "-c", "0"]):
        assert cli.main(["doctor", "--watch", *command]) == 2
        assert re.search("no program|must be a number of seconds", capfd.readouterr().err)
    assert cli.main(["doctor", "--watch", "-c", "print('hello')"]) == lock_order.UNSEEN
    assert "did not open the soft device" in capfd.readouterr().err
    with pytest.raises(OptionError, match="at least 1"):
        lock_order.run_watched(["-c", "0"], 0)


@pytest.mark.full
@pytest.mark.parametrize("status", [2, 3, 4, 7])
def test_watch_reports_failure_for_any_exit_status_of_program(status, program, capfd):
    """If a program fails, the exit status of ``graft doctor --watch`` is `lock_order.FAILED`.

    This also applies if the status of the program equals one of the tool's own exit statuses.
    """
    assert cli.main(["doctor", "--watch", program(f"sys.exit({status})")]) == lock_order.FAILED
    text = capfd.readouterr().err
    assert "verdict: no cycle" in text
    assert f"ended with status {status}" in text


def test_soft_launcher_runs_programs_on_the_soft_device(tmp_path, capsys):
    """In a program run by ``graft soft``, cuda.bindings uses the soft device.

    The pytest plugin of graft reports this. ``graft soft`` passes the arguments to the program and
    returns the exit status of the program.
    """
    (tmp_path / "test_it.py").write_text(
        "from cuda.bindings import driver\n"
        "def test_it():\n"
        "    assert driver.cuInit(0)[0] == 0\n"
        "    assert driver.cuDeviceGetName(64, 0)[1].startswith(b'graft soft device')\n"
        "def test_failure():\n"
        "    assert False\n"
    )
    program = ["-m", "pytest", "-p", "graft.tools.pytest_device", str(tmp_path), "-q"]
    tested = subprocess.run(
        [sys.executable, "-m", "graft.tools.cli", "soft", "--", *program],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert tested.returncode == pytest.ExitCode.TESTS_FAILED, tested.stdout + tested.stderr
    assert "1 failed, 1 passed" in tested.stdout
    assert "cuda: graft's soft device, 0 kernels and 0 graphs" in tested.stdout
    assert cli.main(["soft", "no-such-program"]) == 2
    assert "no-such-program" in capsys.readouterr().err
