"""Selecting and opening the device of the process."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from cudagraph_util import (
    PRELUDE,
    ChangingSet,
    assert_raises,
    compile_library,
    run_program,
    run_python,
)
from fork_server import run_forked

import graft.cudagraph
from graft.cudagraph import DeadlineError, Device, DeviceError, Stream, StreamLane, open_device
from graft.cudagraph.driver import chooser, driver
from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.driver.driverlog import DriverLog


def test_open_device_returns_open_device(device: Device) -> None:
    assert open_device() is device
    assert open_device(device.kind, device.ordinal) is device
    assert open_device("auto") is device


def test_device_describe_is_one_line_with_kind(device: Device) -> None:
    text = device.describe()
    assert "\n" not in text and device.kind in text
    assert device.multiprocessor_count >= 1 and device.compute_capability[0] >= 5


def test_device_context_is_made_current_again(device: Device, stream: Stream) -> None:
    """Another library may make its own context current on a thread that has used graft."""
    own = call(cu.cuCtxGetCurrent)
    other = call(cu.cuCtxCreate, None, 0, device.ordinal)
    try:
        assert int(cu.cuCtxGetCurrent()[1]) == int(other)
        stream.query()
        assert int(cu.cuCtxGetCurrent()[1]) == int(own)
    finally:
        call(cu.cuCtxDestroy, other)
    assert int(call(cu.cuCtxGetCurrent)) == int(own)


def test_import_loads_no_driver() -> None:
    done = run_python(
        "import graft.cudagraph.device, graft.cudagraph.graph.graph, graft.native._native as n;"
        "print(repr(n.loaded_library('libcuda.so.1')))"
    )
    assert done.stdout.strip() == "''", done.stderr


def test_soft_device_rejects_other_loaded_driver(tmp_path) -> None:
    """If another driver is already loaded, the error names it and the required import order."""
    source = 'extern "C" int cuInit(unsigned) { return 100; }\n'
    fake = compile_library(source, tmp_path, "libcuda.so.1")
    loads = f"import ctypes; ctypes.CDLL({str(fake)!r})\n"
    done = run_python(loads + PRELUDE, GRAFT_DEVICE="soft")
    assert done.returncode == 1
    assert "DeviceError" in done.stderr and str(fake) in done.stderr and "import" in done.stderr


def test_device_selection_auto_falls_back_to_soft() -> None:
    """ "auto" probes NVIDIA's driver in a child process, so that the soft device can be loaded."""
    done = run_python(
        """
from graft.cudagraph import open_device
from graft.cudagraph.driver import chooser
_, why = chooser.probe_cuda()
device = open_device()
print(device.kind, bool(why), device.fallback_reason == why and device.describe().endswith(why))
""",
        GRAFT_DEVICE="auto",
    )
    assert done.stdout.split() in (["soft", "True", "True"], ["cuda", "False", "True"]), done.stderr


@pytest.mark.parametrize(
    ("startup_s", "chosen"), [(20, ("cuda", "")), (60, ("soft", "no answer within 30 s"))]
)
def test_device_selection_waits_for_slow_driver(
    monkeypatch, startup_s: float, chosen: tuple[str, str]
) -> None:
    """If NVIDIA's driver does not answer within 30 s, the fallback reason of the device says so."""

    answer = '{"status": 0, "version": 13000, "devices": ["a GPU"]}'
    communicate = subprocess.Popen.communicate

    def communicate_slowly(child: subprocess.Popen[str], *, timeout: float) -> tuple[str, str]:
        if timeout < startup_s:
            raise subprocess.TimeoutExpired(child.args, timeout)
        return communicate(child, timeout=timeout)

    monkeypatch.setattr(chooser, "PROBE", f"print({answer!r})")
    monkeypatch.setattr(subprocess.Popen, "communicate", communicate_slowly)
    assert chooser.choose("auto") == chosen


def test_soft_device_rejects_cupy_import(device: Device) -> None:
    """Importing a package that needs NVIDIA's driver raises an ImportError of one line."""
    if device.kind != "soft":
        pytest.skip("requires the soft device")
    with pytest.raises(ImportError, match="soft device") as caught:
        import cupy  # noqa: F401
    assert isinstance(caught.value, DeviceError) and "\n" not in str(caught.value)


def test_open_device_cuda_without_driver_raises_device_error() -> None:
    if not chooser.probe_cuda()[1]:
        pytest.skip("there is a CUDA device")
    done = run_forked(
        "from graft.cudagraph.device import open_device\n"
        "from graft.cudagraph.errors import DeviceError\n"
        "try: open_device('cuda')\n"
        "except DeviceError as error: print(error)\n"
        "print(open_device('soft').kind)"
    )
    lines = done.stdout.splitlines()
    assert len(lines) >= 2 and lines[-1] == "soft", done.stderr


def test_driver_error_has_function_and_code(device: Device) -> None:
    with pytest.raises(DeviceError) as caught:
        device.empty((1 << 60,), "uint8")
    error = caught.value
    assert error.api == "cuMemAlloc" and error.code != 0
    assert error.code_name.startswith("CUDA_ERROR_") and error.code_name in str(error)


def test_stream_synchronize_deadline_names_host_function(stream: Stream) -> None:
    gate = threading.Event()

    def stuck() -> None:
        gate.wait()

    StreamLane(stream).host(stuck)
    try:
        assert not stream.query()
        assert_raises(DeadlineError, {"stuck": lambda: stream.synchronize(timeout_s=0.05)})
    finally:
        gate.set()
    stream.synchronize(timeout_s=30)
    assert stream.query()


def test_device_synchronize_while_another_thread_creates_streams(
    device: Device, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[Stream] = []
    streams = ChangingSet([stream], lambda: created.append(device.stream("late")))
    monkeypatch.setattr(device, "_streams", streams)
    device.synchronize(30)
    streams.changer.join()
    assert created[0] in streams
    created[0].close()
    device.synchronize(30)  # the set still contains the closed stream


def test_ctrl_c_interrupts_synchronize(device: Device) -> None:
    """KeyboardInterrupt ends the wait for a stream; the enqueued work continues."""
    done = run_program("""
import _thread
gate = threading.Event()
StreamLane(stream).host(gate.wait)
threading.Timer(0.2, _thread.interrupt_main).start()
try:
    stream.synchronize()
except KeyboardInterrupt:
    print("left")
gate.set()
stream.synchronize(30)
""")
    assert done.stdout.strip() == "left", done.stderr
    assert done.returncode == 0


README = (Path(graft.cudagraph.__file__).parent / "README.md").read_text()
PROGRAMS = [
    part.partition("```")[0] for part in README.split("```python\n")[1:] if "open_device" in part
]


@pytest.mark.parametrize(
    "code", PROGRAMS, ids=["graph", "picture", "conditional", "host-step-in-body", "pinned"]
)
def test_readme_example_prints_documented_output(code: str) -> None:
    done = run_forked(code)
    assert done.stdout.strip() == code.strip().rpartition("# ")[2], done.stderr


class LogLibrary:
    """A driver with an error log, which contains the lines that `texts` yields call by call."""

    def __init__(self, texts: list[bytes]) -> None:
        self.texts = iter(texts)

    def cuLogsCurrent(self, position, flags: int) -> int:
        position._obj.value = 7
        return 0

    def cuLogsDumpToMemory(self, position, buffer, size, flags: int) -> int:
        text = next(self.texts)
        assert position._obj.value >= 7 and size._obj.value > len(text)
        position._obj.value += 1
        buffer[: len(text)] = text
        size._obj.value = len(text)
        return 0


def test_new_messages_of_the_driver_log_become_part_of_errors(device, monkeypatch) -> None:
    library = LogLibrary([b"[CUDA][E] size is 0\n[CUDA][E] hint\n", b""])
    monkeypatch.setattr(driver, "_error_detail", DriverLog(library))
    with pytest.raises(DeviceError, match=r"\(.*: \[CUDA\]\[E\] size is 0; \[CUDA\]\[E\] hint\)"):
        driver.check_code("cuMemAlloc", 1)
    with pytest.raises(DeviceError) as info:
        driver.check_code("cuMemAlloc", 1)
    assert "CUDA][E]" not in str(info.value)
    monkeypatch.setattr(driver, "_error_detail", DriverLog(object()))  # a driver without a log
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_VALUE"):
        driver.check_code("cuMemAlloc", 1)


@pytest.mark.parametrize(
    ("code", "is_fault"),
    [
        *((code, True) for code in (214, 220, 226, 700, 702, 709, 719, 999)),
        *((code, False) for code in (1, 2, 704, 720)),
    ],
)
def test_faults_abandon_eager_work(device, monkeypatch, code: int, is_fault: bool) -> None:
    """After a fault, the driver calls no host function any more, so nothing waits for them.

    704 (peer access is already enabled) and 720 (a cooperative launch is too large) are no faults.
    """
    abandoned = []
    native = SimpleNamespace(
        abandon_eager=lambda: abandoned.append("eager"),
        abandon_mailboxes=lambda: abandoned.append("mailboxes"),
        is_context_fault=driver._native.is_context_fault,
    )
    monkeypatch.setattr(driver, "_native", native)
    with pytest.raises(DeviceError):
        driver.check_code("cuStreamSynchronize", code)
    assert abandoned == (["eager", "mailboxes"] if is_fault else [])
