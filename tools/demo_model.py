"""Where the demo model lives: a small Llama and its EAGLE-3 head that travel with the package."""

from __future__ import annotations

from pathlib import Path

import graft.models


def demo_folder() -> Path:
    """Folder of the demo checkpoints, ``target`` and ``eagle3`` within."""
    return Path(graft.models.__path__[0]) / "demo"


def demo_model() -> tuple[Path, Path]:
    """Folders of the demo target and of its drafter."""
    return demo_folder() / "target", demo_folder() / "eagle3"
