"""The ``graft`` command: ``graft generate`` and ``graft doctor``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from graft.cudagraph.errors import GraftError
from graft.tools import doctor, generate

REFUSED = 2


def parser() -> argparse.ArgumentParser:
    """The command line; each subcommand sets ``run``, a function of the parsed options."""
    top = argparse.ArgumentParser(
        prog="graft", description="Guided, speculating generation in one CUDA graph.")
    commands = top.add_subparsers(dest="command", required=True)
    generate.add_arguments(commands.add_parser(
        "generate", help="generate text, guided by a schema, expression, grammar or choice"))
    doctor.add_arguments(commands.add_parser(
        "doctor", help="say what this machine has and what to do about what is missing"))
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; refusals are one line on stderr and exit status 2, Ctrl-C is 130."""
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except GraftError as error:
        print(f"graft: {' '.join(str(error).split())}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("graft: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away; nothing more can be said, and Python's own flush at exit must not.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
