"""The version of graft."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path


def version() -> str:
    """Return the version of the installed package, or of the source tree if none is installed."""
    try:
        return importlib.metadata.version("graft-cuda")
    except importlib.metadata.PackageNotFoundError:
        path = Path(__file__).resolve().parents[1] / "pyproject.toml"
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        return str(project["version"])
