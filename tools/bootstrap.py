"""Build graft's virtual environment: check the tools, install the pins, build the native part.

Run by the Makefile with the system's Python; needs the standard library only. Each step is stamped
with a digest of what it depends on, so a second run does nothing. Usage::

    python3 tools/bootstrap.py VENV [--packages-only | --force-native]
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROBE = "#include <optional>\nint main() { if constexpr (sizeof(int) > 1) return 0; }\n"


class BootstrapError(Exception):
    """Something that graft needs is missing or failed; the text says what to do."""


def find_compiler() -> list[str]:
    """Command of a C++ compiler that compiles and links C++17; ``CXX`` wins.

    Raises
    ------
    BootstrapError
        When none is found, or the one named by ``CXX`` does not work.
    """
    named = os.environ.get("CXX")
    for candidate in [named] if named else ["c++", "g++", "clang++"]:
        command = shlex.split(candidate)
        if not shutil.which(command[0]):
            continue
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cpp")
            source.write_text(PROBE)
            built = subprocess.run(
                [*command, "-std=c++17", str(source), "-o", f"{folder}/probe"],
                capture_output=True,
                text=True,
            )
        if built.returncode == 0:
            return command
        if named:
            raise BootstrapError(f"CXX={named} does not compile C++17: {built.stderr.strip()}")
    wanted = f"CXX={named}" if named else "c++, g++ or clang++"
    raise BootstrapError(
        f"graft needs a C++17 compiler and found none ({wanted}); Debian and "
        "Ubuntu: apt install g++"
    )


def check_tools() -> None:
    """Refuse to start without the tools that pip cannot bring."""
    if sys.platform != "linux":
        raise BootstrapError(f"graft runs on Linux; this is {sys.platform}")
    for tool in ("git", "make"):
        if not shutil.which(tool):
            raise BootstrapError(
                f"graft needs {tool} and found none; Debian and Ubuntu: apt install {tool}"
            )
    find_compiler()


def read_project() -> dict[str, Any]:
    """The parsed pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def digest(*parts: bytes) -> str:
    """Digest of byte strings, length-prefixed so that two lists never collide by joining."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


def native_sources() -> list[Path]:
    """Files whose change asks for a new build of the native part, in a fixed order."""
    kinds = {".cpp", ".h", ".hpp", ".S", ".txt", ".cmake", ".in"}
    return sorted(p for p in (ROOT / "native").rglob("*") if p.suffix in kinds)


@contextmanager
def step(title: str) -> Iterator[None]:
    """Say what starts and, when it is done, how long it took: one line."""
    start = time.monotonic()
    print(f"[graft] {title} ...", end="", flush=True)
    try:
        yield
    except BaseException:
        print(" failed", flush=True)
        raise
    print(f" {time.monotonic() - start:.0f} s", flush=True)


def run(command: Sequence[str], doing: str, **env: str) -> None:
    """Run a command in silence; on failure show the end of what it said."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **env},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        tail = "\n".join(done.stdout.strip().splitlines()[-40:])
        raise BootstrapError(f"{doing} failed ({shlex.join(command)}):\n{tail}")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder's build lock: two makes at once take turns."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_environment(folder: Path) -> Path:
    """Create the virtual environment when it is not there; return its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        version = ".".join(map(str, sys.version_info[:3]))
        with step(f"making {folder.name} with Python {version}"):
            venv.create(folder, with_pip=True, symlinks=True)
    return python


def install_pins(folder: Path, python: Path, project: dict[str, Any]) -> None:
    """Install what the project asks for, in the versions of constraints.txt.

    What ``tool.graft.no-deps`` names comes without what it asks for.
    """
    table = project["project"]
    wanted = [*table["dependencies"], *table["optional-dependencies"]["dev"]]
    bare = project["tool"]["graft"]["no-deps"]
    pins = ROOT / "constraints.txt"
    stamp = folder / ".graft-pins"
    state = digest(pins.read_bytes(), *(p.encode() for p in [*wanted, "--no-deps", *bare]))
    if stamp.exists() and stamp.read_text() == state:
        return
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--constraint",
        str(pins),
    ]
    with step(f"installing {len(wanted) + len(bare)} pinned packages (minutes the first time)"):
        run([*pip, *wanted], "installing packages")
        run([*pip, "--no-deps", *bare], "installing packages")
    stamp.write_text(state)


def build_native(folder: Path, python: Path, force: bool) -> None:
    """Build the C++ part and install graft in editable form, when a source changed."""
    sources = native_sources()
    parts = [str(p.relative_to(ROOT)).encode() + b"\0" + p.read_bytes() for p in sources]
    wanted = digest((ROOT / "pyproject.toml").read_bytes(), *parts)
    stamp = folder / ".graft-native"
    if not force and stamp.exists() and stamp.read_text() == wanted:
        return
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-build-isolation",
        "--no-deps",
        "-e",
        ".",
    ]
    cores = len(os.sched_getaffinity(0))
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(cores))
    path = f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    with step("building the native part (C++)"):
        run(command, "building the native part", CMAKE_BUILD_PARALLEL_LEVEL=jobs, PATH=path)
    stamp.write_text(wanted)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do every step that is due; return the exit status."""
    parser = argparse.ArgumentParser(description="Build graft's virtual environment.")
    parser.add_argument("venv", type=Path, help="folder of the virtual environment")
    parser.add_argument("--packages-only", action="store_true", help="leave the native part out")
    parser.add_argument("--force-native", action="store_true", help="rebuild the native part")
    options = parser.parse_args(arguments)
    folder = (ROOT / options.venv).absolute()
    try:
        check_tools()
        project = read_project()
        with alone(ROOT / "build" / "environment"):
            python = make_environment(folder)
            install_pins(folder, python, project)
            if not options.packages_only:
                build_native(folder, python, options.force_native)
    except BootstrapError as error:
        print(f"graft: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
