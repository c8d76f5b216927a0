"""Helpers for command line tools: error output, tables, and a thread that competes for the GIL."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from graft.cudagraph.errors import GraftError

#: Exit status if a GraftError or OSError ended the program.
REFUSED = 2


def print_refusal(error: Exception) -> int:
    """Print an error as one line on stderr and return the exit status."""
    print(f"graft: {' '.join(str(error).split())}", file=sys.stderr)
    return REFUSED


def program(body: Callable[[Sequence[str] | None], int | None]) -> Callable[..., int]:
    """Decorate the main function of a program so that errors are printed without a traceback.

    The decorated function returns the exit status. A GraftError or OSError is printed as one line
    on stderr, and the exit status is then 2.

    Parameters
    ----------
    body
        Function of the command line arguments. It returns the exit status; None means 0.
    """

    @functools.wraps(body)
    def main(arguments: Sequence[str] | None = None) -> int:
        try:
            return body(arguments) or 0
        except (GraftError, OSError) as error:
            return print_refusal(error)

    return main


def table(rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """Format rows as lines with aligned columns.

    Parameters
    ----------
    rows
        Cells of each row.
    left
        Number of columns, from the left, that are left-aligned. The others are right-aligned.
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
