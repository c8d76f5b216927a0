"""Helpers for command-line tools: standard streams, errors, tables, a thread that takes the GIL."""

from __future__ import annotations

import functools
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from graft.native.errors import GraftError

#: Exit status if a GraftError or OSError ended the program.
REFUSED = 2


def print_refusal(error: Exception) -> int:
    """Print an error as one line on stderr and return the exit status."""
    print(f"graft: {' '.join(str(error).split())}", file=sys.stderr)
    return REFUSED


class _Stream:
    """Wraps a standard stream and handles errors of writes to it.

    After the first error, the wrapper redirects the stream to /dev/null. If the stream is
    `required`, it also raises the error, with the `name` of the stream as `filename`.
    """

    def __init__(self, stream: Any, name: str, required: bool):
        self._stream = stream
        self._name = name
        self._required = required

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text."""
        self._call(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Write the texts that are in the buffer."""
        self._call(self._stream.flush)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        try:
            function(*arguments)
        except OSError as error:
            # Python flushes the stream again when it exits. That flush must not fail too.
            redirect_to_null(self._stream)
            if self._required:
                error.filename = self._name
                raise


def redirect_to_null(stream: Any) -> None:
    """Redirect the file descriptor of a stream to /dev/null, if it has one."""
    try:
        number = stream.fileno()
    except (AttributeError, io.UnsupportedOperation):
        return
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, number)
    os.close(null)


@contextmanager
def standard_streams() -> Iterator[bool]:
    """Make the standard streams usable for as long as the context lasts.

    A stream that was closed when the program started is opened as /dev/null. Otherwise, the next
    file that the program opens would get its descriptor. Failed writes to standard error are
    ignored, because a message that cannot be written must not prevent the output. Characters that
    the terminal cannot encode are written as escape sequences. Yield whether standard output was
    open.
    """
    outer = sys.stdin, sys.stdout, sys.stderr
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
    is_open = sys.stdout is not None
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    streams = []
    for number, stream in enumerate(outer[1:], 1):
        if stream is None:
            stream = os.fdopen(number, "w", encoding="utf-8", closefd=False)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        streams.append(stream)
    sys.stdout = _Stream(streams[0], "standard output", True)  # type: ignore[assignment]
    sys.stderr = _Stream(streams[1], "standard error", False)  # type: ignore[assignment]
    try:
        yield is_open
    finally:
        sys.stdin, sys.stdout, sys.stderr = outer


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, so that the program removes its temporary files."""
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if threading.current_thread() is not threading.main_thread() or not is_default:
        yield
        return

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def program(body: Callable[[Sequence[str] | None], int | None]) -> Callable[..., int]:
    """Decorate the main function of a program so that errors are printed without a traceback.

    The function takes the command line arguments and returns the exit status, or None for 0. If it
    raises a GraftError or OSError, the error is printed as one line on stderr, and the exit status
    is 2.
    """

    @functools.wraps(body)
    def main(arguments: Sequence[str] | None = None) -> int:
        try:
            return body(arguments) or 0
        except (GraftError, OSError) as error:
            return print_refusal(error)

    return main


def table(rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """Format rows as lines of text.

    The first `left` columns are left-aligned, the others right-aligned.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = []
    for row in texts:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.ljust(width) if column < left else cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


@contextmanager
def busy_python(work: Callable[[], object]) -> Iterator[None]:
    """Run a thread that calls `work` in a loop until the context ends.

    The thread executes bytecode without a pause and therefore competes for the GIL.
    """
    stop = False

    def run() -> None:
        while not stop:
            work()

    thread = threading.Thread(target=run, name="busy Python")
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()
