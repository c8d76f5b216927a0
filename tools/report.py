"""What the tools have in common: how a program refuses, tables, and a busy interpreter."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from graft.cudagraph.errors import GraftError

REFUSED = 2


def refuse(error: Exception) -> int:
    """Say in one line on stderr what was refused; returns the exit status."""
    print(f"graft: {' '.join(str(error).split())}", file=sys.stderr)
    return REFUSED


def program(body: Callable[[Sequence[str] | None], int | None]) -> Callable[..., int]:
    """Make the main function of a program of one that takes the command line's arguments.

    What graft or the system refuses becomes one line on stderr and exit status 2.
    """

    @functools.wraps(body)
    def main(arguments: Sequence[str] | None = None) -> int:
        try:
            return body(arguments) or 0
        except (GraftError, OSError) as error:
            return refuse(error)

    return main


def table(rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """Rows as lines of text, columns as wide as they must be, the first ``left`` to the left."""
    said = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*said, strict=True)]
    lines = []
    for row in said:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


@contextmanager
def busy_python(work: Callable[[], object]) -> Iterator[None]:
    """While open, a thread calls ``work`` again and again, in bytecode that keeps the GIL."""
    stop = False

    def call_again() -> None:
        while not stop:
            work()

    thread = threading.Thread(target=call_again, name="busy Python")
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()
