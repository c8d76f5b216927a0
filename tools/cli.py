"""The command ``graft`` and its subcommands."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import re
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

# Other modules of graft are imported inside functions, so that `main` handles Ctrl-C during these
# imports, which take most of the startup time.

#: Exit status if the output cannot be written.
FAILED = 1
#: Exit status after Ctrl-C.
INTERRUPTED = 130
#: Exit status if the reader of the output has closed the pipe.
BROKEN_PIPE = 141
#: Module and description of each subcommand.
COMMANDS = {
    "generate": ("generate", "generate text, optionally under a schema, regex or grammar"),
    "serve": ("serve.command", "run an OpenAI-compatible HTTP server (requires the extra serve)"),
    "doctor": ("doctor", "check this machine and suggest fixes"),
    "soft": ("soft", "run a program on the soft device"),
    "import": ("gguf.convert", "convert a GGUF file to a model folder"),
    "demo": (
        "demo.command",
        "generate ten outputs in one batch, nine of them with different grammars",
    ),
}
#: Subcommands that print their result on standard output, which must therefore be open.
ANSWERING = ("generate", "demo", "doctor")


class _Parser(argparse.ArgumentParser):
    """An argument parser whose error messages shorten long arguments."""

    def error(self, message: str) -> NoReturn:
        """Print an error and exit with status 2."""
        super().error(re.sub(r"(\S{80})\S{20,}", r"\1...", message))

    def refuse_unknown(self, arguments: Sequence[str]) -> NoReturn:
        """Print an error that names unknown arguments and the most similar option, and exit."""
        message = f"unrecognized arguments: {' '.join(arguments)}"
        options = [name for action in self._actions for name in action.option_strings]
        name = arguments[0].partition("=")[0]
        if name in options:  # before the subcommand
            self.error(f"{message}; options follow the subcommand: {self.prog} {arguments[0]}")
        similar = difflib.get_close_matches(name, options, 1)
        self.error(message + (f"; did you mean {similar[0]}?" if similar else ""))


def parser(arguments: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the argument parser of ``graft``.

    If the `arguments` are given, the parser knows the options of those subcommands only that the
    arguments name, because their modules take most of the startup time. The attribute `run` of the
    parsed options is the function that runs the subcommand, and `parser` is its parser.
    """
    from graft.tools.version import version

    top = _Parser(
        prog="graft",
        description="LLM inference with structured output and speculative decoding in one CUDA "
        "graph.",
    )
    top.add_argument("--version", action="version", version=f"graft {version()}")
    commands = top.add_subparsers(dest="command", required=True)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=_sentence(text))
        command.set_defaults(parser=command)
        if arguments is None or name in arguments:
            importlib.import_module(f"graft.tools.{module}").add_arguments(command)
    return top


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status.

    If the subcommand raises a GraftError, the error is printed as one line on stderr, and the exit
    status is 2.
    """
    try:
        from graft.tools.console import standard_streams

        with standard_streams() as has_stdout:
            return _run(arguments, has_stdout)
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            print("graft: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(arguments: Sequence[str] | None, has_stdout: bool) -> int:
    """Run a subcommand and return the exit status.

    `has_stdout` says whether standard output was open when the program started.
    """
    from graft.native.errors import GraftError, OptionError
    from graft.tools.console import print_refusal

    if arguments is None:
        arguments = sys.argv[1:]
    try:
        options, unknown = parser(arguments).parse_known_args(arguments)
        if unknown:
            options.parser.refuse_unknown(unknown)
        if not has_stdout and options.command in ANSWERING:
            raise OptionError("standard output is closed, so the output cannot be written")
        if getattr(options, "parallel", False) and not _is_first_rank(options):
            return 0
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except GraftError as error:
        return print_refusal(error)
    except BrokenPipeError:
        return BROKEN_PIPE
    except OSError as error:
        print(f"graft: {error}", file=sys.stderr)
        return FAILED


def _is_first_rank(options: argparse.Namespace) -> bool:
    """Join the group of tensor-parallel ranks; return whether this process is rank 0.

    In any other rank, return only when rank 0 has finished; until then, compute this rank's part of
    the model.
    """
    from graft.cudagraph.ranks.ranks import RankGroup
    from graft.models.llm.worker_rank import run_worker

    options.ranks = RankGroup.from_mpi()
    if options.ranks.rank == 0:
        return True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C
    run_worker(options.ranks)
    return False


if __name__ == "__main__":
    sys.exit(main())
