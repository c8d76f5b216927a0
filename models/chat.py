"""Chat templates, rendered where neither their time nor their memory is the engine's."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import jinja2

from graft.models import chat_child
from graft.models.errors import TokenizerError

#: What one rendering may take.
LIMIT_S, MEMORY_BYTES = 5.0, 1 << 29


class ChatTemplate:
    """A model's chat template.

    Parameters
    ----------
    source : Jinja's text.
    where : what errors call it.

    Raises
    ------
    TokenizerError
        When it does not parse.
    """

    def __init__(self, source: str, where: str):
        self._source, self._where = source, where
        try:
            chat_child.environment().parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TokenizerError(f"{where}: chat template does not parse: {error}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of a conversation.

        Raises
        ------
        TokenizerError
            When the template fails, refuses, or takes more than 5 s or 512 MiB, or a variable is
            nothing that JSON could hold.
        """
        try:
            question = json.dumps([self._source, variables])
        except (TypeError, ValueError, RecursionError) as error:
            raise TokenizerError(f"{self._where}: the chat's messages: {error}") from error
        done, said = _CHILD.ask(question)
        if not done:
            raise TokenizerError(f"{self._where}: the chat template failed: {said}")
        return said


class _Child:
    """The process that renders, for all engines of this one; a new one after one has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, question: str) -> tuple[bool, str]:
        with self._lock:
            process = self._process = self._process or self._start()
            try:
                process.stdin.write(question.encode() + b"\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
                line = process.stdout.readline()  # type: ignore[union-attr]
                if line:
                    done, said = json.loads(line)
                    return done, said
            except OSError:
                line = b""  # it has ended
            except BaseException:  # Ctrl-C: its answer would be taken for the next one's
                self._end()
                raise
            code = self._end()
            late = code == -signal.SIGALRM
            return False, f"took longer than {LIMIT_S:g} s" if late else f"ended with status {code}"

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        return subprocess.Popen(
            [sys.executable, "-P", chat_child.__file__, str(LIMIT_S), str(MEMORY_BYTES)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    def _end(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        with contextlib.suppress(BrokenPipeError):
            process.communicate()
        return process.returncode

    def close(self) -> None:
        with self._lock:
            self._end()


_CHILD = _Child()
atexit.register(_CHILD.close)
os.register_at_fork(after_in_child=_CHILD.__init__)  # type: ignore[misc]  # its parent's is not its
