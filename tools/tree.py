"""Create the folder build/tree, from which graft can be imported without being installed.

Usage::

    python3 tools/tree.py [--build]      then set PYTHONPATH=build/tree

``build/tree/graft/<package>`` is a symbolic link to the folder of a package. Only
``build/tree/graft/native`` is a real folder. It contains symbolic links to the Python files and,
with ``--build``, the libraries that CMake builds.

The folder has two uses. First, on a machine without network access or scikit-build-core, graft can
be built and run with only CMake and nanobind. Second, mypy checks the packages in this folder,
because there the packages have the names that they have after an installation.
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
PACKAGES = ("cudagraph", "sampling", "grammar", "models", "tools")


def link(target: Path, path: Path) -> None:
    """Create a relative symbolic link at `path` to `target`. Replace an existing link."""
    text = os.path.relpath(target, path.parent)
    if path.is_symlink():
        if os.readlink(path) == text:
            return
        path.unlink()
    path.symlink_to(text)


def make_tree() -> Path:
    """Create the symbolic links, and return the folder for PYTHONPATH."""
    native = TREE / "graft" / "native"
    native.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        link(ROOT / package, TREE / "graft" / package)
    sources = {}
    for path in (ROOT / "native").iterdir():
        if path.is_dir() or path.suffix == ".py":
            sources[path.name] = path
    for path in native.iterdir():
        if path.is_symlink() and path.name not in sources:
            path.unlink()
    for name, target in sources.items():
        if name != "__pycache__":
            link(target, native / name)
    return TREE


def build(python: str) -> int:
    """Build the C++ part with CMake, install it into the tree, and return the exit status.

    Parameters
    ----------
    python
        Path of the Python interpreter to build for.
    """
    cmake = shutil.which("cmake")
    if cmake is None:
        print("graft: building the C++ part needs cmake, which was not found", file=sys.stderr)
        return 1
    if importlib.util.find_spec("nanobind") is None:
        print(
            f"graft: building the C++ part needs nanobind, which {python} does not have",
            file=sys.stderr,
        )
        return 1
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    cores = len(os.sched_getaffinity(0))
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(cores))
    configure = [cmake, "-S", str(ROOT / "native"), "-B", str(BUILD), *generator]
    configure += [f"-DPython_EXECUTABLE={python}", "-DCMAKE_BUILD_TYPE=Release"]
    compile_sources = [cmake, "--build", str(BUILD), "--parallel", jobs]
    install = [cmake, "--install", str(BUILD), "--prefix", str(TREE)]
    for command in (configure, compile_sources, install):
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            print(done.stdout, file=sys.stderr)
            print(f"graft: {' '.join(command)} failed", file=sys.stderr)
            return done.returncode
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Create the tree, with --build also the C++ part, and return the exit status."""
    parser = argparse.ArgumentParser(description="Create an importable graft in build/tree.")
    parser.add_argument("--build", action="store_true", help="also build the C++ part into it")
    options = parser.parse_args(arguments)
    make_tree()
    return build(sys.executable) if options.build else 0


if __name__ == "__main__":
    sys.exit(main())
