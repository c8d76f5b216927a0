"""Reports for waits that exceeded their deadline.

A report contains the Python and native stacks of the waiting thread and of the threads that run
host functions.
"""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

from graft.cudagraph.driver import softstats
from graft.cudagraph.driver.chooser import SONAME, soft_library
from graft.native import _native

#: Maximum number of frames per stack in a report.
MAX_FRAMES = 12
#: Seconds to wait for a thread to report its native stack.
STACK_LIMIT_S = 2.0


def describe_running() -> str:
    """Describe the calling thread, which waits, and the running host functions, with their stacks.

    A host function has no Python stack while it waits for the GIL, or if it runs no Python. Its
    native stack shows which is the case. Taking a native stack interrupts the thread by a signal,
    which may end a native sleep early. The text starts with a line break and can be appended to an
    error message.
    """
    frames = sys._current_frames()
    me = threading.current_thread()
    lines = [f"\nwaiting: thread {me.name!r} ({threading.get_native_id()})"]
    lines += _python_stack(frames.get(threading.get_ident()), skip=1)
    lines += _native_stack(0)
    running = _native.running_host_work()
    for node, replay, seconds, thread, tid in running:
        where = f"replay {replay}" if replay else "not in a graph"
        lines.append(f"running: host step {node!r} ({where}) for {seconds:.3f} s in thread {tid}")
        lines += _python_stack(frames.get(thread))
        lines += _native_stack(tid)
    if not running:
        lines.append("running: no host step of graft")
    lines += _soft_device()
    return "\n".join(lines)


def _python_stack(frame: FrameType | None, skip: int = 0) -> list[str]:
    if frame is None:
        return ["  in no Python function"]
    stack = traceback.format_stack(frame)
    stack = stack[: len(stack) - skip]
    return [
        "  Python stack, innermost frame last:",
        *(entry.rstrip() for entry in stack[-MAX_FRAMES:]),
    ]


def _native_stack(tid: int) -> list[str]:
    frames: list[str] = _native.thread_stack(tid, STACK_LIMIT_S)
    if not frames:
        return ["  the thread did not report its native stack"]
    return [
        "  native stack, innermost frame first:",
        *(f"    {frame}" for frame in frames[:MAX_FRAMES]),
    ]


def _soft_device() -> list[str]:
    """Return the driver calls and kernels in progress if this process uses the soft device."""
    loaded = _native.loaded_library(SONAME)
    if not loaded or Path(loaded).resolve() != soft_library().resolve():
        return []
    description = softstats.describe()
    if not description:
        return []
    return ["soft device:", *(f"  {line}" for line in description.splitlines())]
