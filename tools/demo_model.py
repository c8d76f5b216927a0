"""Where the demo model lives: a small Llama and its EAGLE-3 head that travel with the package."""

from __future__ import annotations

from pathlib import Path

import graft.models


def demo_model() -> tuple[Path, Path]:
    """Folders of the demo target and of its drafter."""
    folder = Path(graft.models.__path__[0]) / "demo"
    return folder / "target", folder / "eagle3"
