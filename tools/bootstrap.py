"""Create graft's virtual environment, install the pinned packages and build the C++ part.

The Makefile runs this script with the system's Python, so it uses only the standard library. After
each step, a stamp file with a digest of the step's inputs is written to the environment. In a later
run, the step is skipped if the digest has not changed. Usage::

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
CXX17_PROGRAM = "#include <optional>\nint main() { if constexpr (sizeof(int) > 1) return 0; }\n"


class BootstrapError(Exception):
    """A required program is missing, or a step of the setup failed.

    The message says what to install, or contains the output of the failed command.
    """


def find_compiler() -> list[str]:
    """Return the command of a C++ compiler that compiles and links C++17.

    If the environment variable ``CXX`` is set, its value is the compiler. Otherwise, the compiler
    is the first of ``c++``, ``g++`` and ``clang++`` that works.

    Raises
    ------
    BootstrapError
        If no compiler is found, or the compiler that ``CXX`` names does not work.
    """
    named = os.environ.get("CXX")
    for candidate in [named] if named else ["c++", "g++", "clang++"]:
        command = shlex.split(candidate)
        if not shutil.which(command[0]):
            continue
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cpp")
            source.write_text(CXX17_PROGRAM)
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
    """Check the tools that pip cannot install.

    Raises
    ------
    BootstrapError
        If a tool is missing, or the operating system is not Linux.
    """
    if sys.platform != "linux":
        raise BootstrapError(f"graft runs on Linux; this is {sys.platform}")
    for tool in ("git", "make"):
        if not shutil.which(tool):
            raise BootstrapError(
                f"graft needs {tool} and found none; Debian and Ubuntu: apt install {tool}"
            )
    find_compiler()


def read_project() -> dict[str, Any]:
    """Return the parsed pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def digest(*parts: bytes) -> str:
    """Return a digest of a sequence of byte strings.

    The length of each string is part of the digest, so that different sequences whose
    concatenations are equal have different digests.
    """
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


def native_sources() -> list[Path]:
    """Return the source files from which the C++ part is built, in a fixed order."""
    kinds = {".cpp", ".h", ".hpp", ".S", ".txt", ".cmake", ".in"}
    return sorted(p for p in (ROOT / "native").rglob("*") if p.suffix in kinds)


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print the title of a step, run the step, and add its duration to the line."""
    start = time.monotonic()
    print(f"[graft] {title} ...", end="", flush=True)
    try:
        yield
    except BaseException:
        print(" failed", flush=True)
        raise
    print(f" {time.monotonic() - start:.0f} s", flush=True)


def run(command: Sequence[str], doing: str, **env: str) -> None:
    """Run a command without printing its output.

    Parameters
    ----------
    command
        Program and arguments.
    doing
        Description of what the command does, for error messages.
    **env
        Additional environment variables.

    Raises
    ------
    BootstrapError
        If the command fails. The message contains the end of its output.
    """
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
def build_lock(folder: Path) -> Iterator[None]:
    """Hold the lock file of a folder, so that concurrent runs of make wait for each other."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_environment(folder: Path) -> Path:
    """Create the virtual environment if it does not exist; return the path of its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        version = ".".join(map(str, sys.version_info[:3]))
        with step(f"creating {folder.name} with Python {version}"):
            venv.create(folder, with_pip=True, symlinks=True)
    return python


def install_pins(folder: Path, python: Path, project: dict[str, Any]) -> None:
    """Install the required packages in the versions that constraints.txt specifies.

    The packages that ``tool.graft.no-deps`` in pyproject.toml lists are installed without their
    dependencies.
    """
    table = project["project"]
    development_packages = table["optional-dependencies"]["dev"]
    packages = [*table["dependencies"], *development_packages]
    without_dependencies = project["tool"]["graft"]["no-deps"]
    pins = ROOT / "constraints.txt"
    stamp = folder / ".graft-pins"
    names = [*packages, "--no-deps", *without_dependencies]
    encoded_names = [name.encode() for name in names]
    state = digest(pins.read_bytes(), *encoded_names)
    if stamp.exists() and stamp.read_text() == state:
        return
    command = pip_install(python, "--constraint", str(pins))
    count = len(packages) + len(without_dependencies)
    with step(f"installing {count} pinned packages (minutes the first time)"):
        run([*command, *packages], "installing packages")
        run([*command, "--no-deps", *without_dependencies], "installing packages")
    stamp.write_text(state)


def pip_install(python: Path, *options: str) -> list[str]:
    """Return the command line of ``pip install`` with options."""
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return [*pip, *options]


def build_native(folder: Path, python: Path, force: bool) -> None:
    """Build the C++ part and install graft in editable mode.

    If no source file has changed since the last build, do nothing, unless `force` is set.
    """
    parts = [(ROOT / "pyproject.toml").read_bytes()]
    for source in native_sources():
        name = str(source.relative_to(ROOT)).encode()
        parts.append(name + b"\0" + source.read_bytes())
    state = digest(*parts)
    stamp = folder / ".graft-native"
    if not force and stamp.exists() and stamp.read_text() == state:
        return
    command = pip_install(python, "--no-build-isolation", "--no-deps", "-e", ".")
    cores = len(os.sched_getaffinity(0))
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(cores))
    system_path = os.environ.get("PATH", "")
    path = f"{folder / 'bin'}{os.pathsep}{system_path}"
    with step("building the C++ part"):
        run(command, "building the C++ part", CMAKE_BUILD_PARALLEL_LEVEL=jobs, PATH=path)
    stamp.write_text(state)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps that are necessary, and return the exit status."""
    parser = argparse.ArgumentParser(description="Create graft's virtual environment.")
    parser.add_argument("venv", type=Path, help="folder of the virtual environment")
    parser.add_argument("--packages-only", action="store_true", help="do not build the C++ part")
    parser.add_argument("--force-native", action="store_true", help="always rebuild the C++ part")
    options = parser.parse_args(arguments)
    folder = (ROOT / options.venv).absolute()
    try:
        check_tools()
        project = read_project()
        with build_lock(ROOT / "build" / "environment"):
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
