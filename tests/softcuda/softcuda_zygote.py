"""Forks children that have Python, NumPy and cuda.bindings imported but no device opened.

A fresh interpreter costs a second on a loaded machine, and every test of a fault needs a process
of its own. Reads one JSON request a line ({code, env, out, err, limit}) and answers with the
child's exit status (negative: killed by that signal).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from typing import Any


def child(request: dict[str, Any]) -> None:
    """Run the request's code as a script would; never returns to the caller's loop."""
    for descriptor, path in ((1, request["out"]), (2, request["err"])):
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    status = 0
    try:
        exec(compile(request["code"], "<child>", "exec"), {"__name__": "__main__"})
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.exit(status)  # a full exit: finalisation and static destructors run


def wait(pid: int, limit: float) -> int:
    """Wait for a child, killing it after ``limit`` seconds."""
    end = time.monotonic() + limit
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -int(signal.SIGALRM)
        time.sleep(0.002)


def serve() -> None:
    """Answer requests until standard input closes."""
    import cuda.bindings.driver
    import numpy
    import softcuda_util

    del cuda, numpy, softcuda_util
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(request)
        print(wait(pid, request["limit"]), flush=True)


if __name__ == "__main__":
    serve()
