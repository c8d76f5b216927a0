"""Make build/tree an importable graft without installing anything.

``build/tree/graft/<room>`` links to the rooms; ``graft/native`` holds links to the Python files
and, with ``--build``, the libraries that CMake installs beside them. Usage::

    python3 tools/tree.py [--build]      then PYTHONPATH=build/tree

This is how graft runs on a machine with no network and no scikit-build-core (CMake and nanobind are
still needed for ``--build``), and how mypy sees the package under its installed names.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "tree"
BUILD = ROOT / "build" / "cuda"
LINKED = ("cudagraph", "sampling", "grammar", "models", "tools")


def link(target: Path, place: Path) -> None:
    """Make ``place`` a relative link to ``target``, replacing an older link."""
    text = os.path.relpath(target, place.parent)
    if place.is_symlink():
        if os.readlink(place) == text:
            return
        place.unlink()
    place.symlink_to(text)


def make_tree() -> Path:
    """Lay out the links and return the folder for PYTHONPATH."""
    native = TREE / "graft" / "native"
    native.mkdir(parents=True, exist_ok=True)
    for room in LINKED:
        link(ROOT / room, TREE / "graft" / room)
    wanted = {p.name: p for p in (ROOT / "native").iterdir() if p.is_dir() or p.suffix == ".py"}
    for place in native.iterdir():
        if place.is_symlink() and place.name not in wanted:
            place.unlink()
    for name, target in wanted.items():
        if name != "__pycache__":
            link(target, native / name)
    return TREE


def build(python: str) -> int:
    """Configure, build and install the native part into the tree; return the exit status."""
    cmake = shutil.which("cmake")
    if cmake is None:
        print("graft: building the native part needs cmake and found none", file=sys.stderr)
        return 1
    if importlib.util.find_spec("nanobind") is None:
        print(
            f"graft: building the native part needs nanobind, which {python} does not have",
            file=sys.stderr,
        )
        return 1
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))
    for command in (
        [
            cmake,
            "-S",
            str(ROOT / "native"),
            "-B",
            str(BUILD),
            *generator,
            f"-DPython_EXECUTABLE={python}",
            "-DCMAKE_BUILD_TYPE=Release",
        ],
        [cmake, "--build", str(BUILD), "--parallel", jobs],
        [cmake, "--install", str(BUILD), "--prefix", str(TREE)],
    ):
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            print(done.stdout, file=sys.stderr)
            print(f"graft: {' '.join(command)} failed", file=sys.stderr)
            return done.returncode
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the tree, and build into it when asked; return the exit status."""
    parser = argparse.ArgumentParser(description="Make build/tree an importable graft.")
    parser.add_argument("--build", action="store_true", help="also build the native part into it")
    options = parser.parse_args(arguments)
    make_tree()
    return build(sys.executable) if options.build else 0


if __name__ == "__main__":
    sys.exit(main())
