"""Temporary folders that do not outlive their process for long, even if it is killed."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["scratch_folder"]

# Minimum age in seconds of a folder that `_delete_unused` deletes. The process that has created a
# younger folder may not have locked it yet.
_MIN_AGE_S = 60.0


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Create a temporary folder, and delete it when the context ends.

    A process that is killed cannot delete its folder. The first call in a process therefore deletes
    the folders with this prefix that no process uses. A process locks its folder while it uses the
    folder, and the operating system releases the lock when the process ends.
    """
    _delete_unused(prefix)
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        lock = os.open(name, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # the file system has no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(lock)


@functools.cache
def _delete_unused(prefix: str) -> None:
    """Delete unused folders of this user in the folder for temporary files.

    These are the folders whose name begins with `prefix` and that no process has locked.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            state = folder.lstat()
            if state.st_uid != os.geteuid() or time.time() - state.st_mtime < _MIN_AGE_S:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
