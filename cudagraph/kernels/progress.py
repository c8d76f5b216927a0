"""Progress of kernel compilation, shown on stderr.

The first start on a machine compiles all kernels, which takes several seconds. Later starts load
the kernels from the cache and show nothing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

#: Compilation time of this process in seconds after which the progress is shown.
DELAY_S = 1.0
#: Interval at which the elapsed time is updated.
REFRESH_S = 0.5

_requested: bool | None = None
_spent_s = 0.0


def show_compile_progress(shown: bool | None) -> None:
    """Set whether this process shows the progress of kernel compilation.

    None, the default, shows it only if stderr is a terminal.
    """
    global _requested
    _requested = shown


@contextlib.contextmanager
def compile_progress(name: str) -> Iterator[None]:
    """Show the name of a kernel source on stderr while the source compiles.

    Nothing is shown before the process has spent `DELAY_S` seconds in compilations.
    """
    global _spent_s
    if not _is_shown():
        yield
        return
    finished = threading.Event()
    display = threading.Thread(target=_display, args=(name, finished), daemon=True)
    start = time.monotonic()
    display.start()
    try:
        yield
    finally:
        finished.set()
        display.join()
        _spent_s += time.monotonic() - start


def _is_shown() -> bool:
    if _requested is not None:
        return _requested
    return sys.stderr is not None and sys.stderr.isatty()


def _display(name: str, finished: threading.Event) -> None:
    start = time.monotonic() - _spent_s
    if finished.wait(max(0.0, DELAY_S - _spent_s)):
        return
    from tqdm import tqdm  # its import takes as long as that of the CUDA bindings

    with tqdm(bar_format="{desc}", leave=False) as bar:
        while not finished.is_set():
            seconds = time.monotonic() - start
            bar.set_description_str(f"compiling kernels: {name} ({seconds:.0f} s)")
            finished.wait(REFRESH_S)
