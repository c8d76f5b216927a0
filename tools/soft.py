"""``graft soft PROGRAM [ARGS...]``: runs a program on the soft device.

It is loaded before anything else of the program, so that cuda.bindings, cuda.core and graft find it
under the driver's name. What it can and cannot do: ``native/softcuda/README.md``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from graft.cudagraph.chooser import soft_library
from graft.cudagraph.errors import DeviceError, OptionError


def command_of(program: list[str]) -> list[str]:
    """The command line of a program: a Python file, ``-m module``, ``-c code``, or an executable.

    Raises
    ------
    OptionError
        There is no such program.
    """
    if program[:1] == ["--"]:
        program = program[1:]
    if not program:
        raise OptionError("there is no program to run")
    first = program[0]
    if first in ("-m", "-c") and len(program) > 1:
        return [sys.executable, *program]
    if first.endswith(".py") and Path(first).is_file():
        return [sys.executable, *program]
    found = shutil.which(first)
    if found is None:
        raise OptionError(f"there is no program {first!r}")
    return [found, *program[1:]]


def environment() -> Mapping[str, str]:
    """Environment in which a program finds the soft device, loaded before any other driver.

    Raises
    ------
    DeviceError
        The soft device is not built.
    """
    library = soft_library()
    if not library.is_file():
        raise DeviceError(f"the soft device is not built: {library} does not exist (make native)")
    loaded = " ".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
    return {**os.environ, "GRAFT_DEVICE": "soft", "LD_PRELOAD": loaded}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``graft soft``."""
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="PROGRAM [ARGS...]",
        help="a .py file, -m MODULE, -c CODE or an executable (behind -- where it "
        "begins with a dash); it takes this process's place",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Become the program."""
    command = command_of(options.program)
    sys.stdout.flush()
    os.execve(command[0], command, environment())
