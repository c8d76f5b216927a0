"""Helpers of the command line tools: errors, tables, and a thread that keeps the GIL busy."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from graft.cudagraph.errors import GraftError

REFUSED = 2


def print_refusal(error: Exception) -> int:
    """Print an error as one line on stderr and return the exit status."""
    print(f"graft: {' '.join(str(error).split())}", file=sys.stderr)
    return REFUSED


def program(body: Callable[[Sequence[str] | None], int | None]) -> Callable[..., int]:
    """Decorate the main function of a program, which gets the command line arguments.

    A GraftError or OSError is printed as one line on stderr, with exit status 2.
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
        Number of columns that are aligned to the left; the others are aligned to the right.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = []
    for row in texts:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


@contextmanager
def busy_python(work: Callable[[], object]) -> Iterator[None]:
    """Run a thread that calls `work` in a loop of bytecode, which keeps the GIL busy."""
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
