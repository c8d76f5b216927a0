"""Resident memory of the server over thousands of requests, each with a different schema."""

import gc
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from engine_util import demo_engine
from serving_util import run_server, wait_for

from graft.models.engine.request_state import RequestState
from graft.models.request import Output, Request
from graft.tools.serve.request_parser import ApiRequest
from graft.tools.serve.request_stream import RequestStream

SERVER = """
from graft.models.engine.engine import Engine
from graft.models.engine.options import InternalOptions
from graft.tools.demo_model import demo_model
from graft.tools.serve.app import Service, Settings
from graft.tools.serve.command import bind_socket
from graft.tools.serve.engine_driver import EngineDriver
from graft.tools.serve.server import Server

target, drafter = demo_model()
internal = InternalOptions(grammar_cache_bytes=4 << 20)
engine = Engine(target, drafter, max_batch_size=8, internal=internal)
listener = bind_socket("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
Server(Service(EngineDriver(engine), Settings("demo")), listener, 10.0).start()
engine.close()
"""
CLIENTS = 8
#: Requests per measurement, and the number of measurements until all caches are full.
STEP = 1000
WARM_STEPS = 2


@contextmanager
def server_process() -> Iterator[tuple[int, int]]:
    """Run a server of the demo model in a child process; yield its process id and its port."""
    child = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        assert "serving" in child.stdout.readline()
        yield child.pid, port
    finally:
        child.terminate()
        assert child.wait(60) == 0


def resident_bytes(process_id: int) -> int:
    """Return the resident memory of a process."""
    with open(f"/proc/{process_id}/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["VmRSS"].split()[0]) << 10


def send(port: int, number: int) -> str:
    """Send a chat completion with a prompt and schema for this number; return the finish reason."""
    properties = {f"field_{number}_{i}": {"type": "integer"} for i in range(40)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": f"Extract number {number} of the fields. " * 8}],
        "max_tokens": 6,
        "closing": "off",
        "stream": number % 2 == 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    assert response.status == 200, text
    return "length" if '"length"' in text else text


def measure(steps: int) -> list[int]:
    """Send `STEP` requests per step; return the resident memory in bytes after each step."""
    sizes = []
    with server_process() as (process_id, port), ThreadPoolExecutor(CLIENTS) as clients:
        for step in range(steps):
            numbers = range(step * STEP, (step + 1) * STEP)
            reasons = list(clients.map(lambda number: send(port, number), numbers))
            assert set(reasons) == {"length"}
            sizes.append(resident_bytes(process_id))
            print(f"{numbers.stop} requests: {sizes[-1] / 2**20:.1f} MiB", flush=True)
    return sizes


def live_requests() -> list[object]:
    """Return all live objects that belong to a request."""
    gc.collect()
    types = (Request, RequestState, Output, ApiRequest, RequestStream)
    return [found for found in gc.get_objects() if isinstance(found, types)]


def test_idle_server_keeps_no_finished_request() -> None:
    """No object of a finished request is alive while its grammar is cached."""
    before = len(live_requests())
    with demo_engine(speculation=False, max_batch_size=2) as engine, run_server(engine) as server:
        port = server._listener.getsockname()[1]
        for number in range(4):
            assert send(port, number) == "length"
        assert engine.counters()["compile"]["cache_entries"] >= 4
        wait_for(lambda: len(live_requests()) == before)


@pytest.mark.soak
def test_resident_memory_of_server_stays_flat():
    """After all caches are full, the memory grows by at most 2 MB per 1,000 requests."""
    sizes = measure(int(os.environ.get("GRAFT_SOAK_STEPS", "6")))
    warm = sizes[WARM_STEPS - 1]
    growth = (sizes[-1] - warm) / (len(sizes) - WARM_STEPS)
    assert growth <= 2e6, [f"{size / 2**20:.1f} MiB" for size in sizes]
