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
from typing import Any


def child(request: dict[str, Any]) -> None:
    """Run the request's code as a script would; never returns to the caller's loop."""
    for descriptor, path in ((1, request["out"]), (2, request["err"])):
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, descriptor)
    signal.alarm(request["limit"])  # whatever it is stuck in, this ends it
    os.environ.clear()
    os.environ.update(request["env"])
    exec(compile(request["code"], "<child>", "exec"), {"__name__": "__main__"})
    sys.exit()  # a full exit, as after an error: finalisation and static destructors run


def serve() -> None:
    """Answer requests until standard input closes."""
    import cuda.bindings.driver  # noqa: F401
    import softcuda_util  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(request)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
