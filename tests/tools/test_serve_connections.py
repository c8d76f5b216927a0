"""Tests of the server's connections: silent and slow clients, and limits of file descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import re
import resource
import signal
import socket
import subprocess
import sys

import pytest

from graft.cudagraph.errors import OptionError

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra serve is not installed")
openai = pytest.importorskip("openai", reason="the package openai is not installed")
pytest.importorskip("httpx", reason="the package httpx is not installed")

from serving_util import open_client, run_server, wait_for  # noqa: E402

from graft.tools.serve import app, connections  # noqa: E402

HALF_HEADER = b"GET /health HTTP/1.1\r\nHost: local"
REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
UNSENT_BODY = REQUEST.replace(b"\r\n\r\n", b"\r\nContent-Length: 9999\r\n\r\n")


def connect(url, data=b""):
    """Return a socket that is connected to a server and has sent data."""
    port = int(re.search(r":(\d+)/", url)[1])
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(data)
    return connection


def read_to_end(connection):
    """Return all data that the server sends until it closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            data += piece
    return data


@pytest.fixture
def many_files():
    """Raise the limit of open files of this process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    ("max_files", "num_silent"), [(256, 300), pytest.param(1024, 2000, marks=pytest.mark.full)]
)
def test_server_serves_others_while_many_connections_are_silent(max_files, num_silent, many_files):
    """More silent connections than file descriptors do not block other clients or fill the log."""
    serve = f"{sys.executable} -m graft.tools.cli serve --port 0"
    with (
        subprocess.Popen(
            ["bash", "-c", f"ulimit -n {max_files} && exec {serve}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
        contextlib.ExitStack() as sockets,
    ):
        try:
            url = re.search(r"http://\S+", process.stdout.readline())[0]
            with open_client(url, timeout=20) as client:
                for i in range(num_silent):
                    data = HALF_HEADER if i % 2 else b""
                    sockets.enter_context(connect(url, data))
                    if i % 50 == 49:
                        with connect(url, REQUEST) as one:
                            assert one.recv(1 << 16).startswith(b"HTTP/1.1 200")
                response = client.completions.create(model="graft-demo", prompt="a", max_tokens=2)
                assert response.usage.completion_tokens == 2
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    assert re.fullmatch(r"WARNING:  \d+ connections are open, which is the limit: .*\n", log)


@pytest.mark.parametrize("data", [b"", HALF_HEADER, REQUEST, REQUEST + HALF_HEADER, UNSENT_BODY])
def test_server_closes_connections_without_request(data, engine, monkeypatch):
    """The server closes a connection that sends no complete header, even if it sends some bytes.

    Earlier requests of the connection are answered.
    """
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.1)
    received = b""
    with run_server(engine) as server, connect(server.url, data) as connection:
        connection.settimeout(0.02)
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                with contextlib.suppress(TimeoutError):
                    piece = connection.recv(1 << 16)
                    if not piece:
                        break
                    received += piece
                connection.sendall(b"x" if data else b"")
            else:
                pytest.fail("the connection was not closed")
    assert received.count(b"HTTP/1.1 200") == data.count(b"\r\n\r\n")


def test_server_closes_connections_that_receive_no_responses(engine):
    """The server closes a connection that sends requests and does not read the responses."""
    request = b"GET /v1/models/%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"a" * 8000)
    with run_server(engine, io_timeout_s=0.1) as server, connect(server.url) as connection:
        with contextlib.suppress(ConnectionError):
            while True:
                connection.sendall(request)
        wait_for(lambda: not server.server_state.connections)


def test_server_at_connection_limit_closes_only_waiting_connections(engine):
    """At the limit, silent connections are closed. Connections with a running request stay open."""
    with (
        run_server(engine) as server,
        open_client(server.url) as client,
        contextlib.ExitStack() as sockets,
    ):
        server.server_state.limit = 4
        stream = client.completions.create(
            model="demo", prompt="a", max_tokens=100, logit_bias={"3": -1000}, stream=True
        )
        next(iter(stream))
        silent = [sockets.enter_context(connect(server.url)) for _ in range(8)]
        assert [read_to_end(connection) for connection in silent[:5]] == [b""] * 5
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert len(server.server_state.connections) <= 4


HALF_BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 1000\r\n\r\n{"prompt": "'
)


def test_server_does_not_count_requests_without_complete_body(engine):
    """Requests whose body is incomplete do not count towards the limit on waiting requests."""
    with (
        run_server(engine, max_waiting=1 - engine.options.max_batch_size) as server,
        open_client(server.url) as client,
        contextlib.ExitStack() as sockets,
    ):
        for _ in range(3):
            sockets.enter_context(connect(server.url, HALF_BODY))
        wait_for(lambda: len(server.server_state.tasks) == 3)
        response = client.completions.create(model="demo", prompt="a", max_tokens=2)
        assert response.usage.completion_tokens == 2


def test_server_limits_size_of_bodies_that_arrive_at_once(engine, monkeypatch):
    monkeypatch.setattr(app, "MAX_RECEIVED_BYTES", 700)
    with (
        run_server(engine, max_body_bytes=600) as server,
        open_client(server.url) as client,
        connect(server.url, HALF_BODY + b"a" * 500),
    ):
        wait_for(lambda: server.service._received_bytes > 500)
        with pytest.raises(openai.RateLimitError, match="too many request bodies arrive at once"):
            client.completions.create(model="demo", prompt="a" * 400)
        assert client.completions.create(model="demo", prompt="a", max_tokens=1).usage


def test_log_omits_repeated_messages(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
    records = []
    logger = logging.Logger("test")
    logger.addHandler(logging.Handler())
    logger.handlers[0].emit = lambda record: records.append(record.getMessage())
    logger.addFilter(connections.RepeatFilter())
    for i in range(5):
        now[0] = i * 20.0
        logger.warning("refused %d", i)
    logger.warning("another message")
    assert records == [
        "refused 0",
        "refused 3 (2 more such messages were omitted)",
        "another message",
    ]


def test_server_writes_warnings_of_graft_to_stderr(capsys):
    with connections.log_to_stderr():
        for number in range(2):
            logging.getLogger("graft").warning("replica %d died", number)
    logging.getLogger("graft").warning("not shown")
    assert capsys.readouterr().err == "graft: replica 0 died\n"


def test_loop_error_without_descriptors_takes_one_line(caplog):
    loop = asyncio.new_event_loop()
    error = OSError(errno.EMFILE, "Too many open files")
    context = {"message": "socket.accept() out of system resource", "exception": error}
    with caplog.at_level(logging.ERROR):
        connections.handle_loop_error(loop, context)
        connections.handle_loop_error(loop, {"message": "other", "exception": ValueError("x")})
    loop.close()
    first, second = caplog.records
    assert first.getMessage() == (
        "socket.accept() out of system resource: [Errno 24] Too many open files"
    )
    assert first.exc_info is None
    assert second.exc_info[0] is ValueError


def test_server_refuses_to_start_with_too_few_descriptors(monkeypatch):
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (100, 100))
    with pytest.raises(OptionError, match=r"at most 100 files can be open \(ulimit -n\)"):
        connections.max_connections(8)
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    assert connections.max_connections(8) == connections.MAX_UNUSED_CONNECTIONS + 8
