"""Locations of the demo model: a small Llama and two drafters, which are part of the package."""

from __future__ import annotations

from pathlib import Path

import graft.models

#: Names of the demo model's drafters: an EAGLE-3 head and a block drafter.
DRAFTERS = ("eagle3", "dflash")


def demo_model(drafter: str = DRAFTERS[0]) -> tuple[Path, Path]:
    """Return the folders of the demo target and of one of its drafters."""
    folder = Path(graft.models.__path__[0]) / "demo"
    return folder / "target", folder / drafter
