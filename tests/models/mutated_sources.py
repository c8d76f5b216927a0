"""Folders with changed copies of kernel sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path


def write_sources(sources: Mapping[Path, str]) -> Path:
    """Write files, given as text by relative path, to a folder, and return the folder.

    The folder depends only on its contents, so that the kernels need not be compiled again in the
    next run.
    """
    digest = hashlib.sha256()
    for path, text in sources.items():
        digest.update(f"{path}\0{text}\0".encode())
    folders = Path(tempfile.gettempdir()) / f"graft-mutants-{os.getuid()}"
    folder = folders / digest.hexdigest()[:24]
    if not folder.exists():
        folders.mkdir(mode=0o700, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folders))
        for path, text in sources.items():
            (scratch / path).parent.mkdir(parents=True, exist_ok=True)
            (scratch / path).write_text(text)
        try:
            scratch.rename(folder)
        except OSError:  # another process has created the folder
            shutil.rmtree(scratch)
    return folder
