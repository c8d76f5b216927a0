"""Choosing and opening the process's device."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest
from cudagraph_util import PRELUDE, compiled, refused, run_program, run_python

import graft.cudagraph
from graft.cudagraph import (
    DeadlineError,
    Device,
    DeviceError,
    OptionError,
    Stream,
    StreamLane,
    chooser,
    open_device,
)


def test_second_open_returns_the_same_device(device: Device) -> None:
    """A process has one device."""
    assert open_device() is device
    assert open_device(device.kind, device.ordinal) is device
    assert open_device("auto") is device


def test_another_device_is_refused(device: Device) -> None:
    """Asking for another kind or ordinal, or a kind that does not exist, names what was asked."""
    other = "cuda" if device.kind == "soft" else "soft"
    refused(
        OptionError,
        {
            other: lambda: open_device(other),
            "7": lambda: open_device(device.kind, 7),
            "'tpu'": lambda: open_device("tpu"),
        },
    )


def test_device_describes_itself_in_one_line(device: Device) -> None:
    """The description is one line that names the kind of device."""
    text = device.describe()
    assert "\n" not in text and device.kind in text
    assert device.multiprocessor_count >= 1 and device.compute_capability[0] >= 5


def test_importing_graft_loads_no_driver() -> None:
    """Only open_device() loads a driver; imports do not."""
    done = run_python(
        "import graft.cudagraph.device, graft.cudagraph.graph, graft.native._native as n;"
        "print(repr(n.loaded_library('libcuda.so.1')))"
    )
    assert done.stdout.strip() == "''", done.stderr


def test_soft_device_refuses_a_process_with_another_driver(tmp_path) -> None:
    """When some libcuda.so.1 is loaded, asking for soft names its path and the import order."""
    source = 'extern "C" int cuInit(unsigned) { return 100; }\n'
    fake = compiled(source, tmp_path, "libcuda.so.1")
    loads = f"import ctypes; ctypes.CDLL({str(fake)!r})\n"
    done = run_python(loads + PRELUDE, GRAFT_DEVICE="soft")
    assert done.returncode == 1
    assert "DeviceError" in done.stderr and str(fake) in done.stderr and "import" in done.stderr


def test_auto_takes_soft_where_no_cuda_device_answers() -> None:
    """`auto` asks NVIDIA's driver in a child process only, so that soft can still be loaded."""
    done = run_python(
        """
from graft.cudagraph import chooser, open_device
_, why = chooser.probe_cuda()
device = open_device()
print(device.kind, bool(why), device.fallback_reason == why and device.describe().endswith(why))
""",
        GRAFT_DEVICE="auto",
    )
    assert done.stdout.split() in (["soft", "True", "True"], ["cuda", "False", "True"]), done.stderr


@pytest.mark.parametrize(
    ("takes_s", "chosen"), [(20, ("cuda", "")), (60, ("soft", "no answer within 30 s"))]
)
def test_a_driver_that_starts_slowly_is_waited_for(
    monkeypatch, takes_s: float, chosen: tuple[str, str]
) -> None:
    """A cold driver has half a minute to answer; one that takes longer is said to be the reason."""

    def slow_child(command: list[str], *, timeout: float, **_: object) -> object:
        if timeout < takes_s:
            raise subprocess.TimeoutExpired(command, timeout)
        said = '{"status": 0, "version": 13000, "devices": ["a GPU"]}'
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(subprocess, "run", slow_child)
    assert chooser.choose("auto") == chosen


def test_soft_device_guards_imports(device: Device) -> None:
    """Importing CuPy in a soft process gives one clear sentence, as an ImportError."""
    if device.kind != "soft":
        pytest.skip("about the soft device")
    with pytest.raises(ImportError, match="soft device") as caught:
        import cupy  # noqa: F401
    assert isinstance(caught.value, DeviceError) and "\n" not in str(caught.value)


def test_cuda_without_a_driver_is_a_device_error() -> None:
    """Where NVIDIA's driver is absent, asking for cuda says so in one typed error."""
    if not chooser.probe_cuda()[1]:
        pytest.skip("there is a CUDA device")
    done = run_python(
        "from graft.cudagraph.device import open_device\n"
        "from graft.cudagraph.errors import DeviceError\n"
        "try: open_device('cuda')\n"
        "except DeviceError as error: print(error)\n"
        "print(open_device('soft').kind)",
    )
    lines = done.stdout.splitlines()
    assert len(lines) >= 2 and lines[-1] == "soft", done.stderr


def test_driver_errors_carry_call_and_code(device: Device) -> None:
    """A failing driver call raises with its name, code, and the driver's name for the code."""
    with pytest.raises(DeviceError) as caught:
        device.empty((1 << 60,), "uint8")
    error = caught.value
    assert error.api == "cuMemAlloc" and error.code != 0
    assert error.code_name.startswith("CUDA_ERROR_") and error.code_name in str(error)


def test_waits_have_deadlines(stream: Stream) -> None:
    """A stream busy with a host function raises DeadlineError, naming the function."""
    gate = threading.Event()

    def stuck() -> None:
        gate.wait()

    StreamLane(stream).host(stuck)
    try:
        assert not stream.query()
        refused(DeadlineError, {"stuck": lambda: stream.synchronize(timeout_s=0.05)})
    finally:
        gate.set()
    stream.synchronize(timeout_s=30)
    assert stream.query()


def test_ctrl_c_leaves_a_wait(device: Device) -> None:
    """KeyboardInterrupt leaves a wait for the device; the work itself goes on."""
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


def test_closed_streams_are_refused(device: Device) -> None:
    """A closed stream names itself when it is used."""
    stream = device.stream("gone")
    stream.close()
    refused(OptionError, {"gone": stream.synchronize})


def test_the_rooms_readme_says_what_happens() -> None:
    """The README's example runs and prints what its comment says."""
    text = (Path(graft.cudagraph.__file__).parent / "README.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    done = run_python(code)
    assert done.stdout.strip() == code.strip().rpartition("# ")[2], done.stderr
