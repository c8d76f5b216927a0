"""Tests of the server process: concurrency, disconnects, overload, draining, failure, startup."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import re
import shlex
import sys
import threading
from pathlib import Path

import pytest

from graft.models.errors import EngineUseError
from graft.tools import cli
from graft.tools.bench import serving as serving_bench
from graft.tools.serve import command
from graft.tools.serve.command import bind_socket

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra serve is not installed")
openai = pytest.importorskip("openai", reason="the package openai is not installed")
pytest.importorskip("httpx", reason="the package httpx is not installed")

from serving_util import (  # noqa: E402
    PERSON,
    chat,
    check_load,
    load_requests,
    open_async_client,
    open_client,
    response_format,
    run_load,
    run_sequentially,
    run_server,
    wait_for,
)

LOCAL_NAMES = {"localhost", "127.0.0.1", "[::1]"}
LONG_REQUEST = {"prompt": "a", "max_tokens": 400, "logit_bias": {"3": -1000}, "temperature": 0}


def test_server_concurrent_requests_equal_sequential_ones(engine, server):
    """Responses to 28 concurrent requests equal the responses to the same requests sent alone.

    Some requests are greedy and others sampled, with and without structured output.
    """
    kinds = [{"seed": i, "temperature": 1.0} for i in range(4)] + [
        {"temperature": 0},
        {"response_format": response_format(PERSON)},
        {"structured_outputs": {"choice": ["red", "green"]}, "seed": 5, "temperature": 2.0},
    ]
    requests = list(itertools.islice(itertools.cycle(kinds), 28))

    async def send_all():
        async with open_async_client(server.url, "key") as client:
            calls = [chat(client, **fields, max_tokens=24) for fields in requests]
            return await asyncio.gather(*calls)

    texts = [response.choices[0].message.content for response in asyncio.run(send_all())]
    with openai.OpenAI(base_url=server.url, api_key="key") as client:
        responses = [chat(client, **fields, max_tokens=24) for fields in kinds]
    expected = [response.choices[0].message.content for response in responses]
    assert texts == list(itertools.islice(itertools.cycle(expected), 28))


@pytest.fixture
def steps(engine, monkeypatch):
    """Return a semaphore. The engine runs one step each time it is released."""
    released = threading.Semaphore(0)
    step = engine.step

    def wait_and_step():
        released.acquire(timeout=30)
        return step()

    monkeypatch.setattr(engine, "step", wait_and_step)
    return released


def test_server_cancels_requests_of_disconnected_clients(server, client, http, steps):
    """The server cancels a request when the client closes the stream or times out."""

    def cancelled():
        page = http.get(f"{server.url.removesuffix('/v1')}/metrics").text
        found = re.search(r'reason="cancelled"\} (\d+)', page)
        return int(found[1]) if found else 0

    driver = server.service.driver
    before = cancelled()
    steps.release(4)
    stream = client.completions.create(model="demo", stream=True, **LONG_REQUEST)
    next(iter(stream))
    assert driver.open_requests == 1
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(model="demo", **LONG_REQUEST)
    wait_for(lambda: server.service.api_requests == 0)
    assert driver.open_requests == 0
    steps.release(1000)
    wait_for(lambda: cancelled() == before + 2)
    assert driver.open_requests == 0


def test_server_returns_429_when_full_and_finishes_requests_while_draining(engine, http, steps):
    with run_server(engine, max_waiting=-7) as server, open_client(server.url) as client:
        steps.release(4)
        chunks = iter(client.completions.create(model="demo", stream=True, **LONG_REQUEST))
        next(chunks)
        with pytest.raises(openai.RateLimitError) as full:
            chat(client)
        assert full.value.response.headers["retry-after"] == "1"
        server.drain()
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            chat(client)
        assert http.get(f"{server.url.removesuffix('/v1')}/health").status_code == 503
        steps.release(1000)
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_server_drain_timeout_ends_streams_with_error(engine, steps):
    with run_server(engine, drain_s=0.0) as server, open_client(server.url) as client:
        steps.release(4)
        chunks = iter(client.completions.create(model="demo", stream=True, **LONG_REQUEST))
        next(chunks)
        server.drain()
        wait_for(lambda: server.should_exit)
        steps.release(1000)
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(chunks)


def test_server_reports_engine_failure(engine, http, monkeypatch):
    """After an engine failure, running and new requests get status 503.

    The health endpoint reports the error.
    """

    def fail():
        raise RuntimeError("the device burns")

    with run_server(engine) as server, open_client(server.url) as client:
        monkeypatch.setattr(engine, "step", fail)
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="the device burns") as caught:
                chat(client)
            assert caught.value.status_code == 503
        root = server.url.removesuffix("/v1")
        assert http.get(f"{root}/health").json() == {
            "status": "the device burns",
            "live": 0,
            "replicas": 1,
        }
        assert 'graft_up{replica="0"} 0.0' in http.get(f"{root}/metrics").text
    monkeypatch.undo()
    while engine.busy:
        [engine.cancel(name) for name in list(engine._scheduler.unfinished)]
        engine.step()


def test_server_metrics_report_engine_failure(engine, http, monkeypatch):
    """Reading the counters waits for the device, so it may be the first call that fails."""

    def fail():
        raise RuntimeError("the device burns")

    with run_server(engine) as server:
        root = server.url.removesuffix("/v1")
        monkeypatch.setattr(engine, "counters", fail)
        page = http.get(f"{root}/metrics")
        assert page.status_code == 200 and 'graft_up{replica="0"} 0.0' in page.text
        wait_for(lambda: http.get(f"{root}/health").json()["status"] == "the device burns")


def test_serve_command_reports_missing_packages_and_used_addresses(monkeypatch, capsys):
    with contextlib.closing(bind_socket("127.0.0.1", 0)) as listener:
        listener.listen()
        port = str(listener.getsockname()[1])
        assert cli.main(["serve", "--port", port]) == 2
    assert f"--port {port}: " in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    for options, words in (
        ([], "the package ray: pip install ray"),
        (["--verify", "rejection"], "--replicas requires --verify coupled"),
    ):
        assert cli.main(["serve", "--port", "0", "--replicas", "2", *options]) == 2
        assert words in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "graft.tools.serve.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["serve"]) == 2
    assert "the module uvicorn: pip install starlette uvicorn" in capsys.readouterr().err
    for module in ("app", "fields"):
        monkeypatch.delitem(sys.modules, f"graft.tools.serve.{module}")
    for package in ("pydantic", "pydantic_core"):
        monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["serve"]) == 2
    assert "the module pydantic: pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--port 99999", "'99999' is not a port from 0 to 65535"),
        ("--port -1", "'-1' is not a port"),
        ("--drain nan", "'nan' is not a non-negative number of seconds"),
        ("--drain -1", "'-1' is not a non-negative number of seconds"),
        ("--drain x", "'x' is not a non-negative number of seconds"),
        ("--replica-timeout 0", "'0' is not a number of seconds of at least 1"),
        ("--reasoning-parser other", "invalid choice: 'other'"),
        ("--api-key ''", "a key must not be empty"),
        ("--api-key a ' '", "a key must not be empty"),
        ("--max-waiting -1", "'-1' is not an integer from 0 to "),
        ("--max-body -1", "'-1' is not an integer from 0 to "),
    ],
)
def test_serve_command_rejects_invalid_options(arguments, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["serve", *shlex.split(arguments)])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "keys", "hosts"),
    [
        ("", (), LOCAL_NAMES),
        ("--host ::1", (), LOCAL_NAMES | {"::1"}),
        ("--api-key a b --api-key c", ("a", "b", "c"), None),
        ("--allowed-host Example.org", (), LOCAL_NAMES | {"example.org"}),
        ("--host 0.0.0.0", (), None),
        ("--host 0.0.0.0 --allowed-host example.org", (), {"example.org"}),
    ],
)
def test_serve_command_accepts_several_keys_and_limits_hosts(arguments, keys, hosts, monkeypatch):
    """Without keys, a server on a loopback address accepts only local host names."""
    monkeypatch.delenv(command.API_KEY_VARIABLE, raising=False)
    options = cli.parser().parse_args(["serve", *arguments.split()])
    assert command.read_api_keys(options.api_key) == keys
    assert command.allowed_hosts(options) == hosts


def test_api_key_variable_can_contain_several_keys(monkeypatch):
    monkeypatch.setenv(command.API_KEY_VARIABLE, "a, b")
    assert command.read_api_keys(None) == ("a", "b")


@pytest.mark.full
def test_serving_bench_completes_all_requests_of_every_rate(tmp_path, capsys):
    """The serving benchmark completes all requests, and its measurements are consistent.

    The server exits with status 0 on SIGTERM.
    """
    assert (
        serving_bench.main(
            ["--rates", "2", "4", "--calls", "6", "--json", str(tmp_path / "serving.json")]
        )
        == 0
    )
    results = json.loads((tmp_path / "serving.json").read_text())
    counts = [(result["rate"], result["complete"], result["requests"]) for result in results]
    assert counts == [(2, 6, 6), (4, 6, 6)]
    for result in results:
        ttft_ms = result["first_token_ms"]
        assert 0 < ttft_ms["p50"] <= ttft_ms["p99"] < result["seconds"] * 1e3
        assert 0 < result["goodput"] <= result["sent_per_s"]
    assert "6/6" in capsys.readouterr().out


def resources(engine):
    """Return resources that must not leak, and the resident memory in bytes.

    The resources are the number of open files, the names of the threads, and the slots and pages
    that the engine holds.
    """

    def synchronize():
        try:
            engine.synchronize()
        except EngineUseError:
            return False  # the thread of the server has not ended its last call yet
        return True

    wait_for(synchronize)
    threads = sorted(thread.name for thread in threading.enumerate())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len(os.listdir("/proc/self/fd"))
    return (files, threads, engine.counters()["held"]), pages * os.sysconf("SC_PAGESIZE")


@pytest.mark.full
def test_server_load_leaks_nothing_and_equals_sequential_requests(engine):
    """A load of 1000 requests, at most 32 at a time, leaks no resources.

    Clients close a tenth of the streams early, and a twentieth of the requests is invalid. Each
    response equals the response to the same request sent alone, and structured outputs are valid.
    The resources are files, threads, slots, pages and memory.
    """
    requests = load_requests()
    with run_server(engine) as server:
        sequential = run_sequentially(server.url, requests)
        asyncio.run(run_load(server.url, requests, 200))
        wait_for(lambda: server.service.driver.open_requests == 0)
        before, bytes_before = resources(engine)
        results = asyncio.run(run_load(server.url, requests, 1000))
        wait_for(lambda: server.service.driver.open_requests == 0)
        gc.collect()
        after, bytes_after = resources(engine)
    check_load(requests, sequential, results)
    assert after == before
    assert bytes_after - bytes_before < 24 << 20
