"""A process that forks children which have graft's packages imported, and graft itself not.

A fresh interpreter costs most of a second, and what can hang or fault needs a process of its own.
graft is imported by the child: it refuses to work in the fork of a process that has imported it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Ended", "Zygote"]

KILLED = -int(signal.SIGALRM)
TICK_S = 0.005


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit status (negative: the signal that killed it), what it wrote."""

    status: int
    seconds: float
    output: str
    errors: str

    @property
    def overdue(self) -> bool:
        """Was it killed because it did not end in time?"""
        return self.status == KILLED


class Zygote:
    """Runs ``graft.tools.<module>.main(arguments)`` in forked children, one after another.

    It is a process of its own, since forking one that has threads is unsafe. Use it as a context.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", "graft.tools.zygote"], text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         start_new_session=True)
        self._one_at_a_time = threading.Lock()

    def run(self, module: str, arguments: list[str], env: dict[str, str],
            limit_s: float) -> Ended:
        """Run one child with this environment; it is killed after ``limit_s`` seconds."""
        with tempfile.TemporaryDirectory(prefix="graft-child-") as folder, self._one_at_a_time:
            out, err = Path(folder) / "out", Path(folder) / "err"
            request = {"module": module, "arguments": arguments, "env": env, "out": str(out),
                       "err": str(err), "limit_s": limit_s}
            assert self._process.stdin is not None and self._process.stdout is not None
            begun = time.monotonic()
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            status = int(self._process.stdout.readline())
            return Ended(status, time.monotonic() - begun, out.read_text(errors="replace"),
                         err.read_text(errors="replace"))

    def close(self) -> None:
        """End the process; a child that still runs is killed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _child(request: dict[str, Any]) -> None:
    """Be the child; never returns."""
    for descriptor, path in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        target = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(target, descriptor)
        os.close(target)
    os.environ.clear()
    os.environ.update(request["env"])
    status = 1
    try:
        module = __import__(f"graft.tools.{request['module']}", fromlist=["main"])
        status = int(module.main(request["arguments"]))
    except SystemExit as stop:
        print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.exit(status)  # a full exit: finalisation and static destructors run


def _wait(pid: int, limit_s: float) -> int:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(TICK_S)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return KILLED


def _serve() -> None:
    """Answer requests until standard input closes."""
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(request)
        print(_wait(pid, request["limit_s"]), flush=True)


if __name__ == "__main__":
    import cuda.bindings.driver  # noqa: F401
    import numpy  # noqa: F401

    with contextlib.suppress(KeyboardInterrupt):
        _serve()
