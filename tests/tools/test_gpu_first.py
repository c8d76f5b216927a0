"""Tests of the check of a GPU (graft.tools.gpu_first): its runner, its sections, whole runs."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_missing_packages import HIDDEN

from graft.native import _native
from graft.tools.gpu_first import __main__ as gpu_first
from graft.tools.gpu_first import runner, stage0

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def restore(monkeypatch):
    """Undo what a run changes in this process, and let later runs start child processes.

    The child processes load no plugins of pytest that are installed.
    """
    monkeypatch.setenv("GPU_FIRST_SMALL", "")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    folder = Path.cwd()
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.chdir(folder)
    runner._stopped = False


# Runner -------------------------------------------------------------------------------------------

TEST_FILE = """
import os, sys, time
import pytest

def test_first(figure):
    figure("bandwidth", 3.0, "GB/s")

def test_faulty(figure):
    figure("before the fault", 1.0, "us")
    FAULT

def test_failing():
    assert 1 == 2

def test_skipped():
    pytest.skip("no reason")

def test_last():
    pass
"""
CONFTEST = "from graft.tools.gpu_first.plugin import figure\n"


#: Seconds by which the runner's clock is ahead while test_faulty runs.
AHEAD_S = 100.0


def write_file(folder, fault, conftest=True):
    """Write `TEST_FILE` with a fault and return its path."""
    if conftest:
        (folder / "conftest.py").write_text(CONFTEST)
    path = folder / "test_it.py"
    path.write_text(TEST_FILE.replace("FAULT", fault))
    return str(path)


def run_file(folder, fault, conftest=True, limit_s=60 + AHEAD_S, test_limit_s=30 + AHEAD_S):
    """Run `TEST_FILE` with a fault; return the outcome by test, the results and the last status.

    A limit of `AHEAD_S` ends test_faulty at once, and gives all other tests and the start of the
    process that many seconds.
    """
    path = write_file(folder, fault, conftest)
    out = folder / "out"
    out.mkdir()
    lines = []
    ahead_s = 0.0

    def report(line):
        nonlocal ahead_s
        lines.append(line)
        if line["event"] == "begin" and line["test"].endswith("test_faulty"):
            ahead_s = AHEAD_S
        elif line["event"] == "end" and limit_s > AHEAD_S:
            ahead_s = 0.0

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s, sleep=time.sleep)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "time", clock)
        problem = runner.run_test_file(
            path, out, report, limit_s=limit_s, test_limit_s=test_limit_s
        )
    ends = {line["test"].rpartition("::")[2]: line for line in lines if line["event"] == "end"}
    return ends, lines, problem


@pytest.mark.parametrize(
    ("fault", "limits", "message"),
    [
        ("os.abort()", {}, "exit status -6"),
        ("os._exit(0)", {}, "the process ended during the test"),
        pytest.param("sys.exit(0)", {}, "SystemExit", marks=pytest.mark.full),
        ("time.sleep(600)", {"test_limit_s": AHEAD_S}, "timed out after 100 s"),
    ],
)
@pytest.mark.full("os._exit")
def test_runner_continues_after_a_faulty_test(tmp_path, fault, limits, message):
    ends, lines, problem = run_file(tmp_path, fault, **limits)
    assert problem == ""
    outcomes = {test: line["outcome"] for test, line in ends.items()}
    assert outcomes == {
        "test_first": "passed",
        "test_faulty": "failed",
        "test_failing": "failed",
        "test_skipped": "skipped",
        "test_last": "passed",
    }
    assert message in ends["test_faulty"]["message"]
    assert "assert 1 == 2" in ends["test_failing"]["message"]
    figures = [line["name"] for line in lines if line["event"] == "figure"]
    assert figures == ["bandwidth", "before the fault"]
    if limits:  # the log has the stacks of the hanging test
        (log,) = (tmp_path / "out").glob("*.log")
        assert "in test_faulty" in log.read_text()


def test_runner_keeps_results_of_a_file_that_exceeds_its_limit(tmp_path):
    ends, _, problem = run_file(tmp_path, "time.sleep(600)", limit_s=AHEAD_S)
    assert problem.startswith("timed out after 100 s")
    assert {test: line["outcome"] for test, line in ends.items()} == {
        "test_first": "passed",
        "test_faulty": "failed",
    }


def test_runner_starts_a_new_process_after_a_lost_device(tmp_path):
    """After an illegal access, the driver fails all calls of the process."""
    fault = (
        "from graft.cudagraph import StreamLane, load_text, open_device\n"
        "    device = open_device()\n"
        "    text = 'extern \"C\" __global__ void broken(int* x) { x[1ll << 32] = 1; }'\n"
        "    kernel = load_text(device, text, 'broken.cu')['broken']\n"
        "    stream = device.stream()\n"
        "    StreamLane(stream).kernel(kernel, 1, 1, [device.zeros((1,), 'int32')])\n"
        "    stream.synchronize(10)\n"
    )
    ends, _, problem = run_file(tmp_path, fault)
    assert problem == "" and ends["test_last"]["outcome"] == "passed"
    assert ends["test_faulty"]["message"].endswith("(the device is lost)")


def test_runner_reports_a_crash_between_tests_and_continues(tmp_path):
    """The exit status begins like that of failed tests."""
    (tmp_path / "conftest.py").write_text(
        "import os\n"
        "import pytest\n"
        "from graft.tools.gpu_first.plugin import figure\n"
        "@pytest.hookimpl(trylast=True)\n"
        "def pytest_runtest_logfinish(nodeid):\n"
        "    if 'test_failing' in nodeid:\n"
        "        os._exit(139)\n"
    )
    ends, _, problem = run_file(tmp_path, "pass", conftest=False)
    assert problem.startswith("exit status 139 outside a test")
    assert ends["test_last"]["outcome"] == "passed"


def test_run_fails_if_a_process_crashes_at_exit(tmp_path, capsys):
    """The next process has no tests left, and succeeds."""
    path = tmp_path / "test_exit.py"
    path.write_text(
        "import atexit, os\ndef test_passing():\n    atexit.register(os.kill, os.getpid(), 11)\n"
    )
    assert runner.main(["--out", str(tmp_path / "out"), str(path)]) == 1
    printed = capsys.readouterr().out
    assert f"{path}: 1 passed exit status -11 outside a test" in printed
    assert f"1 failures\n  {path}" in printed


def test_runner_reports_a_file_that_cannot_be_collected(tmp_path):
    ends, _, problem = run_file(tmp_path, "pass\n\nimport no_such_module")
    assert not ends
    assert "no_such_module" in problem


def test_runner_prints_failures_and_counts(tmp_path, capsys):
    path = write_file(tmp_path, "pass")
    options = ["--out", str(tmp_path / "again"), path, "--", "-k", "faulty or failing"]
    assert runner.main(options) == 1
    printed = capsys.readouterr().out
    assert "assert 1 == 2" in printed
    assert f"{path}: 1 failed, 1 passed" in printed
    assert "1 failures" in printed


def test_driver_log_is_added_to_the_reason_of_a_failure(tmp_path):
    program = "import os, sys; open(os.environ['CUDA_LOG_FILE'], 'w').write('bad handle'); exit(3)"
    reason = runner.run_command([sys.executable, "-c", program], tmp_path / "x.log", 20)
    assert reason == "exit status 3; driver: bad handle"


# Sections -----------------------------------------------------------------------------------------


class FakeDriver:
    """A driver whose functions exist, except one."""

    def cuGetProcAddress_v2(self, name, address, version, flags, found):
        ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))[0] = name != b"cuGraphLaunch"
        return 0


def test_stage0_names_missing_driver_functions(capsys):
    with pytest.raises(SystemExit, match=r"^missing driver functions: cuGraphLaunch 10000 "):
        stage0.check_symbols(FakeDriver())
    found, count = re.findall(r"\d+", capsys.readouterr().out)
    assert int(found) == int(count) - 1 >= 20


def fake_tool(folder, name, script, monkeypatch):
    """Put a shell script into the PATH."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    if str(path.parent) not in os.environ["PATH"]:
        monkeypatch.setenv("PATH", str(path.parent), prepend=os.pathsep)


#: Script of a tool that runs the program after its options, which begins with the interpreter.
RUN = f'while [ "$1" != {sys.executable} ]; do shift; done; "$@" || exit'
SUMMARY = "echo ERROR SUMMARY: 0 errors; echo RACECHECK SUMMARY: 0 hazards displayed"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run in a section without a time limit. The short run of an engine prints two tokens."""
    monkeypatch.setattr(gpu_first, "SHORT_RUN", "print('generated', [[1, 2], [3]])")
    monkeypatch.setattr(gpu_first, "SANITIZED_TESTS", {})
    run = gpu_first.Run(tmp_path / "out", small=True)
    run.deadline = time.monotonic() + 600
    run.section = "x"
    return run


def outcomes(run):
    """Return the outcomes of a run by name."""
    lines = runner.read_lines(run.out / "results.jsonl")
    return {line["name"]: line["outcome"] for line in lines}


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (f"{RUN}; {SUMMARY}", "passed"),
        (SUMMARY, "failed"),  # the program has not run
        (f"echo 'generated [[1, 2], [4]]'; {SUMMARY}", "failed"),  # other tokens
        (f"{RUN}; echo ERROR SUMMARY: 2 errors", "failed"),
        (f"{RUN}; {SUMMARY}; exit 9", "failed"),
        (RUN, "failed"),
    ],
)
def test_sanitizer_requires_status_text_and_summary(run, tmp_path, monkeypatch, script, outcome):
    fake_tool(tmp_path, "compute-sanitizer", script, monkeypatch)
    gpu_first.sanitize(run)
    assert outcomes(run) == {"without tool": "passed", "memcheck": outcome, "racecheck": outcome}


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (f'{RUN}; echo \'"0","kernel"\'; echo \'"1","kernel"\'', "measured"),
        (f"{RUN}; echo '==PROF== no kernels were profiled'", None),
    ],
)
def test_ncu_requires_rows(run, tmp_path, monkeypatch, script, found):
    fake_tool(tmp_path, "ncu", script, monkeypatch)
    monkeypatch.setattr(run, "tests", lambda *paths, **limits: None)
    gpu_first.measure(run)
    assert outcomes(run).get("kernels profiled by ncu") == found
    assert bool(run.failures) == (found is None)


def test_sections_fit_in_one_call():
    """A command may take ten minutes on a GPU machine. The build is short there."""
    limits = [gpu_first.SECTIONS[name].limit_s for name in gpu_first.DEFAULT_SECTIONS]
    assert gpu_first.parse_options([]).minutes <= 9
    assert max(limits) <= 240


@pytest.mark.parametrize(
    ("target", "program"), [("gpu", "gpu_first"), ("test-cuda", "gpu_first.runner tests -- -x")]
)
def test_targets_install_nothing_without_virtual_environment(target, program):
    """`make gpu` builds nothing either, because a failing build must not stop the first checks."""
    command = ["make", "--dry-run", target, "VENV=none", f"PYTHON={sys.executable}", "PYTEST=-x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"-m graft.tools.{program}" in done.stdout
    assert "pip" not in done.stdout
    assert ("cmake" in done.stdout) == (target == "test-cuda")


# Whole runs ---------------------------------------------------------------------------------------

#: Module that Python imports at startup. It hides packages, refuses network connections and adds a
#: driver function that does not exist to those that stage 0 looks up.
ENVIRONMENT = f"""
import pathlib, socket, sys

for name in {HIDDEN}:
    sys.modules[name] = None

class Socket(socket.socket):
    def connect(self, address):
        if self.family != socket.AF_UNIX:
            raise OSError(f"no network: {{address}}")
        super().connect(address)

socket.socket = Socket
"""
MISSING_SYMBOL = """
read_text = pathlib.Path.read_text
def read(path, *args, **options):
    text = read_text(path, *args, **options)
    return text + "CALL(x, cuNoSuchFunction, 1, ())" if path.name == "driver.h" else text
pathlib.Path.read_text = read
"""
#: Pytest plugin that injects a fault into tests.
SABOTAGE = """
import os, time
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    if "test_programmatic_edges_keep_results" in item.nodeid:
        time.sleep(600)
    if "test_graph_runs_child_graphs" in item.nodeid:
        from graft.cudagraph import StreamLane, load_text
        device = item.funcargs["device"]
        text = 'extern "C" __global__ void broken(int* x) { x[1ll << 32] = 1; }'
        kernel = load_text(device, text, "broken.cu")["broken"]
        stream = item.funcargs["stream"]
        StreamLane(stream).kernel(kernel, 1, 1, [item.funcargs["data"]])
        stream.synchronize(10)
    if "test_lanes_synchronize_at_marks[stream]" in item.nodeid:
        os.abort()
    if "test_truth.py::test_products" in item.nodeid:
        os._exit(0)
    if "test_modes" in item.nodeid and "[no grammar" in item.nodeid:
        raise SystemExit(3)
    if "test_measurements.py::test_memory" in item.nodeid:
        os.kill(os.getpid(), 9)
    return (yield)

def pytest_collection_finish(session):
    from graft.cudagraph.device import Device
    from graft.cudagraph.errors import KernelError
    load = Device.load
    def load_broken(device, path, defines=None):
        if path.name == "mask.cu" and "test_compile" in str(session.config.args):
            raise KernelError("mask.cu does not compile")
        return load(device, path, defines)
    Device.load = load_broken
"""
#: Tests that fail with `SABOTAGE`, by section.
SABOTAGED = {
    ("features", "test_features.py::test_programmatic_edges_keep_results"),
    ("features", "test_features.py::test_graph_runs_child_graphs"),
    ("compile", "test_compile.py::test_kernel_file_compiles_and_loads[sampling/mask.cu]"),
    ("tests", "test_lanes.py::test_lanes_synchronize_at_marks[stream]"),
    (
        "truth",
        "test_truth.py::test_products_equal_reference_and_rows_of_larger_products[bfloat16-out]",
    ),
    (
        "modes",
        "test_modes.py::test_mode_generates_tokens_of_rounds[no grammar-loops with automata]",
    ),
    ("measure", "test_measurements.py::test_memory"),
}


def whole_run(tmp_path, monkeypatch, environment, *options):
    """Run all sections with small sizes; return the exit status and the outcome of each result.

    The packages that a GPU machine need not have are hidden. The tools of NVIDIA are replaced.
    """
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(environment)
    (hidden / "sabotage.py").write_text(SABOTAGE)
    monkeypatch.setenv("PYTHONPATH", str(hidden), prepend=os.pathsep)
    fake_tool(tmp_path, "nvidia-smi", "echo a GPU", monkeypatch)
    fake_tool(tmp_path, "ncu", f'{RUN}; echo \'"0","kernel"\'', monkeypatch)
    fake_tool(tmp_path, "compute-sanitizer", f"{RUN}; {SUMMARY}", monkeypatch)
    fake_tool(tmp_path, "make", "exit 0", monkeypatch)
    return tmp_path / "out"


def results_of(out):
    """Return the outcome of each result of a run, and check the output folder."""
    assert sorted(path.name for path in out.iterdir()) == [
        "files.tar.gz",
        "report.txt",
        "results.jsonl",
    ]
    with tarfile.open(out / "files.tar.gz") as archive:
        assert "files/driver.log" in archive.getnames()
    lines = runner.read_lines(out / "results.jsonl")
    return {(line["section"], line["name"]): line["outcome"] for line in lines}


OPTIONS = ("--small", "--minutes", "30")


@pytest.fixture(scope="module")
def small_sections():
    """Sections of a run of the soft device."""
    return list(gpu_first.DEFAULT_SECTIONS)


@pytest.mark.full
def test_run_writes_all_other_results_after_faults(tmp_path, monkeypatch, capfd, small_sections):
    """Each section has a fault: a missing function, a failing build, a hang, a lost device, ..."""
    out = whole_run(tmp_path, monkeypatch, ENVIRONMENT + MISSING_SYMBOL)
    monkeypatch.setattr(gpu_first, "SHORT_RUN", "print('generated', [[1, 2], [3]])")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p sabotage")
    fake_tool(tmp_path, "make", "echo no compiler; exit 2", monkeypatch)
    fake_tool(tmp_path, "compute-sanitizer", SUMMARY, monkeypatch)
    fake_tool(tmp_path, "ncu", "exit 1", monkeypatch)
    monkeypatch.setattr(gpu_first, "TEST_LIMIT_S", 12.0)
    assert gpu_first.main([*OPTIONS, "--out", str(out)]) == 1
    outcomes = results_of(out)
    failed = {key for key, outcome in outcomes.items() if outcome == "failed"}
    tools = {("stage0", "driver"), ("measure", "ncu")}
    if "build/tree" in _native.__file__:
        tools.add(("build", "native module"))  # skipped where graft is installed
    tools |= {("sanitizer", "memcheck"), ("sanitizer", "racecheck")}
    tools |= {("sanitizer", f"memcheck of {name}") for name in gpu_first.SANITIZED_TESTS}
    failed -= {("stage0", "kernels")}  # NVRTC need not be installed
    assert failed == SABOTAGED | tools
    assert {section for section, _ in outcomes} == set(small_sections)
    for section, last in (
        ("stage0", "versions"),
        ("features", "test_features.py::test_waiting_branch_does_not_block_others[mailbox-1]"),
        ("compile", "test_compile.py::test_engine_generates_with_host_nodes"),
        ("tests", "test_lanes.py::test_mark_of_empty_lane_passes_on_dependencies"),
        ("truth", "test_truth.py::test_attention_equals_softmax_and_single_rows[(256, 70)]"),
        ("measure", "test_measurements.py::test_sampling[greedy]"),
    ):
        assert outcomes[section, last] == "passed"
    assert f"{len(run_failures(capfd))} failures" in (out / "report.txt").read_text()


def run_failures(capfd):
    """Return the failures that a run has printed at its end."""
    printed = capfd.readouterr().out.splitlines()
    end = next(i for i, line in enumerate(printed) if line.endswith(" failures"))
    return printed[end + 1 :]


@pytest.mark.full
def test_run_passes_on_the_soft_device(tmp_path, monkeypatch, small_sections):
    out = whole_run(tmp_path, monkeypatch, ENVIRONMENT)
    status = gpu_first.main([*OPTIONS, "--out", str(out)])
    outcomes = results_of(out)
    failed = {key for key, outcome in outcomes.items() if outcome == "failed"}
    assert failed <= {("stage0", "kernels")}  # NVRTC need not be installed
    assert status == bool(failed)
    assert {section for section, _ in outcomes} == set(small_sections)
    for section in ("features", "compile", "tests", "truth", "modes", "measure"):
        passed = [key for key, outcome in outcomes.items() if outcome == "passed"]
        assert any(key[0] == section for key in passed), section
    for name in ("memcheck", "racecheck", "memcheck of conditional nodes"):
        assert outcomes["sanitizer", name] == "passed"


def test_run_starts_without_the_native_module_and_cupy(tmp_path):
    """Stage 0 writes its results before graft is built. The failing build stops no section."""
    program = (
        "import sys\n"
        "for name in ('graft.native._native', 'cupy', 'numpy', 'pytest', 'cuda.bindings'):\n"
        "    sys.modules[name] = None\n"
        "from graft.tools.gpu_first.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    options = ["--small", "--out", str(tmp_path), "--sections", "stage0"]
    subprocess.run([sys.executable, "-c", program, *options], timeout=120)
    lines = runner.read_lines(tmp_path / "results.jsonl")
    outcomes = {line["name"]: line["outcome"] for line in lines}
    assert outcomes["versions"] == outcomes["driver"] == "passed"


def is_running(pid):
    """Return whether a process exists and is no zombie."""
    try:
        return Path("/proc", pid, "stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("section", ["stage0", "modes"])
def test_terminated_run_writes_its_archive(tmp_path, section):
    """SIGTERM ends the program or the test file that runs, and the logs so far are kept."""
    (tmp_path / "hang.py").write_text(
        "import os, pathlib, time\n"
        "print('running', flush=True)\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/hang.py\n")
    smi.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        "PYTEST_ADDOPTS": "-p hang",
    }
    command = [sys.executable, "-m", "graft.tools.gpu_first", "--out", str(tmp_path / "out")]
    child = subprocess.Popen([*command, "--sections", section], env=os.environ | variables)
    pid = tmp_path / "pid"
    while not pid.exists() or not pid.read_text():
        assert child.poll() is None
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 128 + signal.SIGTERM
    with tarfile.open(tmp_path / "out" / "files.tar.gz") as archive:
        logs = [archive.extractfile(file).read() for file in archive if file.name.endswith(".log")]
    assert any(log.startswith(b"running") for log in logs)
    while is_running(pid.read_text()):
        time.sleep(0.02)
