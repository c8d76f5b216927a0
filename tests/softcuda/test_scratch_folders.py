"""Tests of the deletion of temporary folders, also of those that killed processes have left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

import pytest

from graft.native.softcuda import scratch

KILLED = """
import os, signal
from graft.native.softcuda.scratch import scratch_folder
with scratch_folder("scratch-") as folder:
    (folder / "file").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def parent(tmp_path, monkeypatch):
    """Return the folder in which temporary folders are created."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    scratch._delete_unused.cache_clear()
    yield tmp_path
    scratch._delete_unused.cache_clear()


def test_scratch_folder_is_deleted_at_the_end(parent):
    with pytest.raises(ValueError, match="x"), scratch.scratch_folder("scratch-") as folder:
        assert folder.parent == parent and folder.stat().st_mode & 0o777 == 0o700
        raise ValueError("x")
    assert list(parent.iterdir()) == []


def test_scratch_folder_deletes_folders_of_killed_processes(parent):
    """Folders that are in use, young, or have another prefix are kept."""
    done = subprocess.run([sys.executable, "-c", KILLED])
    assert done.returncode == -signal.SIGKILL
    [left] = parent.iterdir()
    (parent / "scratch-young").mkdir()
    (parent / "other").mkdir()
    with scratch.scratch_folder("scratch-") as used:
        assert left.exists()  # it is young
        for folder in (left, used, parent / "other"):
            os.utime(folder, (0, 0))
        scratch._delete_unused.cache_clear()
        with scratch.scratch_folder("scratch-"):
            assert not left.exists() and used.exists()
    assert sorted(path.name for path in parent.iterdir()) == ["other", "scratch-young"]
