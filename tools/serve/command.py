"""The subcommand: its options, its socket, and how it leaves."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from graft.cudagraph.errors import OptionError
from graft.models.engine.engine import Engine
from graft.models.request import VERIFY_MODES, Limits
from graft.tools import generate
from graft.tools.grammar_options import BACKEND_CHOICES

if TYPE_CHECKING:
    from graft.tools.serve.driver import Driver
    from graft.tools.serve.replicas import Replicas

KEY = "GRAFT_API_KEY"
#: Packages of the extra ``serve``.
PACKAGES = ("starlette", "uvicorn", "prometheus_client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``graft serve``."""
    generate.add_model_arguments(parser)
    parser.add_argument(
        "--backend",
        choices=BACKEND_CHOICES,
        default="auto",
        help="who compiles grammars (default auto: chosen for each)",
    )
    parser.add_argument(
        "--verify",
        choices=VERIFY_MODES,
        help="of requests without a seed (default rejection); the others: coupled",
    )
    parser.add_argument(
        "--timeline",
        action="store_true",
        help="stamp every part of a round, for the grammar's exposed time",
    )
    group = parser.add_argument_group("endpoint")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default %(default)s)"
    )
    group.add_argument("--port", type=int, default=8000, help="0: any (default %(default)s)")
    group.add_argument("--name", help="of the model (default: its folder's; graft-demo)")
    group.add_argument(
        "--api-key",
        default=os.environ.get(KEY),
        help=f"that callers must bring (default: what {KEY} says)",
    )
    group.add_argument(
        "--max-waiting",
        type=int,
        default=256,
        metavar="N",
        help="calls that may wait; one more gets a 429 (default %(default)s)",
    )
    limits = Limits()
    group.add_argument(
        "--max-body",
        type=int,
        default=4 << 20,
        metavar="BYTES",
        help="of a call (default %(default)s)",
    )
    group.add_argument(
        "--max-prompt",
        type=int,
        default=limits.prompt_bytes,
        metavar="BYTES",
        help="of a prompt (default %(default)s)",
    )
    group.add_argument(
        "--max-grammar",
        type=int,
        default=limits.grammar_bytes,
        metavar="BYTES",
        help="of a schema or grammar (default %(default)s)",
    )
    group.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="engines in processes of their own, each with a GPU where there are "
        "any; calls of one that dies are begun anew (needs the extra replicas)",
    )
    group.add_argument(
        "--drain",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="to finish what runs after SIGTERM or Ctrl-C; new calls get a 503, and "
        "a second signal ends it (default %(default)g)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal comes.

    Raises
    ------
    OptionError
        The extra ``serve`` is not installed, or the address cannot be had.
    """
    try:
        from graft.tools.serve.app import Service, Settings
        from graft.tools.serve.server import Server
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in PACKAGES:
            raise
        raise OptionError(
            f"serving needs the package {package}: pip install 'graft-cuda[serve]'"
        ) from error
    name = options.name or (options.model.resolve().name if options.model else "graft-demo")
    settings = Settings(name, options.api_key or None, options.max_waiting, options.max_body)
    with (
        contextlib.closing(bound(options.host, options.port)) as listener,
        _driver(options) as driver,
    ):
        Server(Service(driver, settings), listener, options.drain).start()
    return 0


@contextlib.contextmanager
def _driver(options: argparse.Namespace) -> Iterator[Driver | Replicas]:
    """Who answers the calls: an engine, or several. Raises GraftError."""
    from graft.tools.serve.driver import Driver
    from graft.tools.serve.replicas import Replicas

    limits = Limits(prompt_bytes=options.max_prompt, grammar_bytes=options.max_grammar)
    options.verify, asked = options.verify or "rejection", options.verify
    if options.replicas is None:
        limits = replace(limits, waiting=options.max_waiting + options.max_batch_size)
        with _engine(options, limits) as engine:
            yield Driver(engine)
        return
    if options.replicas < 1 or asked not in (None, "coupled"):
        raise OptionError(
            f"--replicas must be from 1 on, and their --verify coupled, so that a "
            f"call can begin anew; got {options.replicas}, {asked}"
        )
    from graft.tools.serve.actors import cluster

    options.verify = "coupled"
    with cluster(options.replicas) as launch:
        replicas = Replicas(
            launch, partial(_engine, options, limits), options.replicas, options.max_waiting
        )
        asyncio.run(replicas.begin())
        yield replicas


def _engine(options: argparse.Namespace, limits: Limits) -> Engine:
    return generate.open_engine(
        options, options.max_batch_size, limits=limits, timeline=options.timeline
    )


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address. Raises OptionError."""
    try:
        [(family, *_, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        made = socket.socket(family)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except BaseException:
            made.close()
            raise
    except (OSError, OverflowError) as error:
        raise OptionError(f"--host {host} --port {port}: {error}") from error
    return made
