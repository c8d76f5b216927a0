"""Both sides of a wait that passed its deadline, with their stacks, Python's and native."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

from graft.cudagraph import softstats
from graft.cudagraph.chooser import SONAME, soft_library
from graft.native import _native

#: Frames told of each stack.
MOST = 12
ANSWER_LIMIT_S = 2.0


def describe_running() -> str:
    """Tell who waits and which host functions run now, with the stacks of both sides.

    The calling thread is the one that waits. A running host function's Python stack is empty while
    it waits for the GIL, or if it needs none; its native stack says which. Taking it interrupts
    that thread by a signal for a moment, which may end a native sleep early.

    Returns
    -------
    str
        Lines, the first of them empty, to follow the message of an error.
    """
    frames = sys._current_frames()
    me = threading.current_thread()
    lines = [f"\nthe waiting side: thread {me.name!r} ({threading.get_native_id()})"]
    lines += _python(frames.get(threading.get_ident()), skip=1) + _native_stack(0)
    running = _native.running_host_work()
    for node, replay, seconds, thread, tid in running:
        which = f"replay {replay}" if replay else "not in a graph"
        lines.append(
            f"the other side: host step {node!r} ({which}) has been running for "
            f"{seconds:.3f} s in thread {tid}"
        )
        lines += _python(frames.get(thread)) + _native_stack(tid)
    if not running:
        lines.append("the other side: no host step of graft's is running")
    lines += _soft_device()
    return "\n".join(lines)


def _python(frame: FrameType | None, skip: int = 0) -> list[str]:
    if frame is None:
        return ["  in no Python function"]
    stack = traceback.format_stack(frame)
    shown = stack[: len(stack) - skip][-MOST:]
    return ["  Python, innermost last:", *(line.rstrip() for line in shown)]


def _native_stack(tid: int) -> list[str]:
    frames: list[str] = _native.thread_stack(tid, ANSWER_LIMIT_S)
    if not frames:
        return ["  the thread did not tell its native stack"]
    return ["  native, innermost first:", *(f"    {frame}" for frame in frames[:MOST])]


def _soft_device() -> list[str]:
    """Driver calls and kernels in progress, where the soft device answers."""
    loaded = _native.loaded_library(SONAME)
    if not loaded or Path(loaded).resolve() != soft_library().resolve():
        return []
    said = softstats.describe()
    return ["the soft device says:", *(f"  {line}" for line in said.splitlines())] if said else []
