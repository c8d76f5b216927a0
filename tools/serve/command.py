"""The subcommand ``graft serve``: its options, and creation of engines, socket and server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from graft.cudagraph.errors import OptionError
from graft.models.engine.engine import Engine
from graft.models.request import Limits
from graft.native.errors import short_repr
from graft.sampling.params import VERIFY_MODES
from graft.tools import generate
from graft.tools.grammar_options import BACKEND_HELP, BACKEND_METAVAR, parse_backend, read_text
from graft.tools.serve.reasoning import REASONING_PARSERS
from graft.tools.serve.tool_formats import TOOL_FORMATS

if TYPE_CHECKING:
    from graft.tools.serve.engine_driver import EngineDriver
    from graft.tools.serve.replicas import Replicas

API_KEY_VARIABLE = "GRAFT_API_KEY"
#: Modules of the packages that the extra ``serve`` installs.
EXTRA_MODULES = ("starlette", "uvicorn", "prometheus_client", "pydantic")
DEFAULT_NAME = "graft-demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``graft serve``."""
    generate.add_model_arguments(parser)
    parser.add_argument(
        "--backend", type=parse_backend, metavar=BACKEND_METAVAR, default="auto", help=BACKEND_HELP
    )
    parser.add_argument(
        "--verify",
        choices=VERIFY_MODES,
        help=f"{generate.option_help('verify')}; requests with a seed always use mode coupled",
    )
    parser.add_argument(
        "--timeline",
        action="store_true",
        help="record a time stamp on the device after every part of a round, for the metric "
        "graft_grammar_exposed_seconds",
    )
    _add_endpoint_arguments(parser.add_argument_group("endpoint"))
    parser.set_defaults(run=run)


def _add_endpoint_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default %(default)s)"
    )
    group.add_argument(
        "--port",
        type=parse_port,
        default=8000,
        help="port; 0 selects a free one (default %(default)s)",
    )
    group.add_argument(
        "--name",
        help=f"model name in the API (default: name of the model folder, or {DEFAULT_NAME})",
    )
    group.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja template that replaces the chat template of the model",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        help="report the reasoning section of an output, which ends with </think>, in the fields "
        "reasoning and reasoning_content; grammars apply to the answer after this section",
    )
    group.add_argument(
        "--tool-call-parser",
        choices=TOOL_FORMATS,
        help="notation in which the model writes tool calls (default: the notation that the chat "
        "template describes, or hermes if it describes none)",
    )
    _add_access_arguments(group)
    _add_replica_arguments(group)
    group.add_argument(
        "--max-waiting",
        type=parse_size,
        default=256,
        metavar="N",
        help="maximum number of waiting requests; any further request gets status 429 "
        "(default %(default)s)",
    )
    _add_limit_arguments(group)
    group.add_argument(
        "--drain",
        type=parse_drain,
        default=30.0,
        metavar="SECONDS",
        help="time after SIGTERM or Ctrl-C in which running requests can complete; during this "
        "time, new requests get status 503; a second signal stops the server at once (default "
        "%(default)g)",
    )


def _add_access_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-key",
        type=parse_key,
        nargs="+",
        action="extend",
        metavar="KEY",
        help="API keys; clients must send one of them (default: value of the variable "
        f"{API_KEY_VARIABLE}, which can contain several keys, separated by commas)",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="host name by which clients address the server; can be repeated (default: any name, "
        "except that a server on a loopback address without API keys accepts only local names)",
    )
    group.add_argument(
        "--access-log", action="store_true", help="write one line per request to standard output"
    )


def _add_replica_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="data parallel: run N engines in separate processes, one GPU each if there are GPUs; "
        "requests of a replica that dies are restarted (requires the extra replicas)",
    )
    group.add_argument(
        "--replica-timeout",
        type=parse_seconds,
        default=60.0,
        metavar="SECONDS",
        help="time after which a replica that does not answer is restarted (default %(default)g)",
    )


def _add_limit_arguments(group: argparse._ArgumentGroup) -> None:
    limits = Limits()
    for name, what, default in (
        ("body", "a request body", 4 << 20),
        ("prompt", "a prompt", limits.prompt_bytes),
        ("grammar", "a schema or grammar", limits.grammar_bytes),
    ):
        group.add_argument(
            f"--max-{name}",
            type=parse_size,
            default=default,
            metavar="BYTES",
            help=f"maximum size of {what} (default %(default)s)",
        )


def parse_port(text: str) -> int:
    """Parse the value of ``--port``."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is not a port from 0 to 65535")
    return int(text)


def parse_key(text: str) -> str:
    """Parse a value of ``--api-key``. Without keys, the server would accept every client."""
    if not text.strip():
        raise argparse.ArgumentTypeError("a key must not be empty")
    return text


def parse_size(text: str) -> int:
    """Parse a number of requests or bytes."""
    if not (text.isascii() and text.isdecimal()) or int(text) > 2**31 - 1:
        raise argparse.ArgumentTypeError(
            f"{short_repr(text)} is not an integer from 0 to {2**31 - 1}"
        )
    return int(text)


def parse_seconds(text: str) -> float:
    """Parse a duration of at least one second."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 1e9:
        raise argparse.ArgumentTypeError(
            f"{short_repr(text)} is not a number of seconds of at least 1"
        )
    return seconds


def parse_drain(text: str) -> float:
    """Parse the value of ``--drain``."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:  # also NaN
        raise argparse.ArgumentTypeError(
            f"{short_repr(text)} is not a non-negative number of seconds"
        )
    return seconds


def run(options: argparse.Namespace) -> int:
    """Run the server until a signal stops it, and return the exit status 0.

    Raise OptionError if a package that serving requires is not installed, or the address cannot
    be bound.
    """
    try:
        from graft.tools.serve.app import Service, Settings
        from graft.tools.serve.connections import log_to_stderr
        from graft.tools.serve.server import Server
    except ModuleNotFoundError as error:
        module = (error.name or "").split(".")[0]
        if module not in EXTRA_MODULES:
            raise
        raise OptionError(
            f"serving needs the module {module}: pip install starlette uvicorn prometheus-client "
            "pydantic"
        ) from error
    name = options.name
    if not name:
        name = options.model.resolve().name if options.model else DEFAULT_NAME
    template = options.chat_template
    settings = Settings(
        name=name,
        api_keys=read_api_keys(options.api_key),
        hosts=allowed_hosts(options),
        chat_template=None if template is None else read_text(template, "--chat-template"),
        reasoning_parser=options.reasoning_parser,
        tool_call_parser=options.tool_call_parser,
        max_waiting=options.max_waiting,
        max_body_bytes=options.max_body,
    )
    with (
        log_to_stderr(),
        contextlib.closing(bind_socket(options.host, options.port)) as listener,
        _open_driver(options) as driver,
    ):
        service = Service(driver, settings)
        Server(service, listener, options.drain, access_log=options.access_log).start()
    return 0


def read_api_keys(keys: Sequence[str] | None) -> tuple[str, ...]:
    """Return the keys of ``--api-key``; without this option, those of `API_KEY_VARIABLE`."""
    if keys is None:
        keys = os.environ.get(API_KEY_VARIABLE, "").split(",")
    return tuple(key.strip() for key in keys if key.strip())


def allowed_hosts(options: argparse.Namespace) -> frozenset[str] | None:
    """Return the value of `Settings.hosts`.

    A server on a loopback address without API keys accepts only local names and the names that
    --allowed-host lists. Otherwise, a web page could send it requests from a browser on this
    machine. A server on another address does not know the names under which clients reach it. It
    accepts any name unless --allowed-host lists names.
    """
    names = set(options.allowed_host or ())
    if is_loopback(options.host):
        if not names and read_api_keys(options.api_key):
            return None
        names |= {"localhost", "127.0.0.1", "[::1]", options.host}
    return frozenset(name.lower() for name in names) or None


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is known to be a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def _open_driver(options: argparse.Namespace) -> Iterator[EngineDriver | Replicas]:
    """Open the engine, or several replicas of it, until the context ends.

    If options contradict each other, raise OptionError.
    """
    from graft.tools.serve.engine_driver import EngineDriver

    limits = Limits(prompt_bytes=options.max_prompt, grammar_bytes=options.max_grammar)
    if options.replicas is not None:
        with _open_replicas(options, limits) as replicas:
            yield replicas
        return
    options.verify = options.verify or "rejection"
    limits = replace(limits, waiting=options.max_waiting + options.max_batch_size)
    with _open_engine(options, limits) as engine:
        yield EngineDriver(engine)


@contextlib.contextmanager
def _open_replicas(options: argparse.Namespace, limits: Limits) -> Iterator[Replicas]:
    from graft.tools.serve.actors import ray_cluster
    from graft.tools.serve.replicas import Replicas

    if options.replicas < 1:
        raise OptionError(f"--replicas must be at least 1, got {short_repr(options.replicas)}")
    if options.verify not in (None, "coupled"):
        raise OptionError(
            "--replicas requires --verify coupled, so that requests can be restarted; "
            f"got {options.verify}"
        )
    options.verify = "coupled"
    with ray_cluster(options.replicas) as launch:
        make_engine = partial(_open_engine, options, limits)
        replicas = Replicas(
            launch, make_engine, options.replicas, options.max_waiting, options.replica_timeout
        )
        asyncio.run(replicas.begin())
        yield replicas


def _open_engine(options: argparse.Namespace, limits: Limits) -> Engine:
    return generate.open_engine(
        options, options.max_batch_size, limits=limits, timeline=options.timeline
    )


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a TCP socket that is bound to an address, or raise OptionError.

    The server calls this function before it loads a model, so that an invalid address is reported
    early.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = addresses[0]
        listener = socket.socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise OptionError(f"--host {host} --port {port}: {error}") from error
    return listener
