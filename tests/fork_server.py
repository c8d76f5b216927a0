"""A process that forks a child process for each program of a test.

A child process has imported `graft.cudagraph` already, which takes most of the time of a short
program. Neither the server nor a new child process has opened a device: a process that is forked
after cuInit cannot use the device.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def run_forked(
    code: str, *arguments: str, env: dict[str, str] | None = None, limit_s: int = 120
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a child process that has imported `graft.cudagraph`.

    Parameters
    ----------
    code
        Program.
    arguments
        Arguments of the program, ``sys.argv[1:]``.
    env
        Environment variables of the program; those of this process by default.
    limit_s
        Time limit in seconds. SIGALRM terminates a program that takes longer.
    """
    with tempfile.TemporaryDirectory(prefix="graft-child-") as folder:
        out = Path(folder) / "out"
        err = Path(folder) / "err"
        request = {
            "code": code,
            "arguments": arguments,
            "env": dict(os.environ) if env is None else env,
            "out": str(out),
            "err": str(err),
            "limit": limit_s,
        }
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        stdout = out.read_text(errors="replace")
        stderr = err.read_text(errors="replace")
        return subprocess.CompletedProcess(code, status, stdout, stderr)


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-c", "import fork_server; fork_server.serve()"],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    atexit.register(_stop, server)
    return server


def _stop(server: subprocess.Popen[str]) -> None:
    """Kill the server and close the pipes to it."""
    with server:
        server.kill()


def serve() -> None:
    """Fork a child process for each request and print its exit status.

    A request is a line of JSON on standard input. If a signal has killed the child process, the
    exit status is the negative number of this signal.
    """
    import graft.cudagraph  # noqa: F401

    gc.collect()
    gc.freeze()  # the garbage collector of a child process need not visit the imported modules
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(request)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(request: dict[str, Any]) -> None:
    """Execute a request in this child process, and exit."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, path in ((1, request["out"]), (2, request["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    signal.alarm(request["limit"])  # terminates a process that hangs, even in native code
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["-c", *request["arguments"]]
    exec(compile(request["code"], "<child>", "exec"), {"__name__": "__main__"})
    sys.exit()  # a regular exit, so that finalization and static destructors run
