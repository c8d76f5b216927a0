"""Tests of data parallel serving: routing, recovery from dead replicas, and load with Ray."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import stat
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from graft.cudagraph.errors import OptionError
from graft.models.request import Event, Limits, Logprob, Output, Request
from graft.tools.demo_model import demo_model
from graft.tools.serve import replicas as replicas_module
from graft.tools.serve.actors import ReplicaActor, private_folder
from graft.tools.serve.engine_driver import EngineInfo
from graft.tools.serve.replicas import SUSPECT_DEATHS, Replicas
from graft.tools.serve.request_stream import RequestStream
from graft.tools.serve.router import Router

INFO = EngineInfo(
    tokenizer=demo_model()[0],
    limits=Limits(),
    max_length=512,
    max_batch_size=4,
    page_size=16,
    pages=64,
)


def test_router_prefers_longest_cached_prefix_then_lowest_load():
    """A replica is not chosen if its load exceeds the lowest load by ``max_batch_size`` requests.

    The router assumes that a page is no longer cached when the replica's cache would have evicted
    the page, or when the replica died.
    """
    router = Router(2, INFO)
    first = list(range(40))
    other = list(range(100, 140))
    keys = router.keys(first)
    assert len(keys) == 2 and router.keys(first[:32]) == keys[:1]
    assert router.keys(["x"] * 40) == router.keys([2**40] * 40) == []  # invalid tokens
    assert router.keys([*first[:16], *other])[:1] == keys[:1] != router.keys(other)[:1]
    assert router.choose(keys, {0: 1, 1: 0}) == 1  # no replica has the prompt cached
    assert router.choose(keys, {0: 0, 1: 3}) == 1  # replica 1 has the prompt cached
    assert router.choose(keys, {0: 0, 1: 4}) == 0  # the load of replica 1 is too high
    assert router.choose(keys, {0: 1, 1: 0}) == 1  # both replicas have the prompt cached
    assert router.choose(router.keys([*first[:16], *other]), {0: 0, 1: 3}) == 0
    assert router.choose(keys, {1: 9}) == 1
    router.choose(router.keys(list(range(1000, 3000))), {1: 0})  # evicts the other pages
    assert router.choose(keys, {0: 3, 1: 0}) == 0
    router.forget(0)
    assert router.choose(keys, {0: 3, 1: 0}) == 1


class FakeActor:
    """A replica without an engine, which generates the tokens 0, 1, 2, ... for each request.

    The text of each token is one letter. The number of tokens per event differs between actors, so
    that a restarted request is split into other events. An actor dies when `kill` is called, or
    when it receives a request of priority 13.

    Attributes
    ----------
    instances
        All actors, in order of creation.
    can_start
        Whether a new actor can start its engine.
    requests
        Requests that this actor received, by id.
    cancelled
        Ids of cancelled requests.
    silence_s
        Delay in seconds of the answer to ``counters``.
    """

    instances: ClassVar[list[FakeActor]] = []
    can_start = True

    def __init__(self):
        self.requests: dict[str, Request] = {}
        self.cancelled: list[str] = []
        self.dead = False
        self.silence_s = 0.0
        self.events: asyncio.Queue[Event | None] = asyncio.Queue()
        self.tokens_per_event = 1 + len(self.instances) % 3
        self.instances.append(self)

    def kill(self):
        self.dead = True
        self.events.put_nowait(None)

    def generate(self, request_id, count=None, first=0):
        """Queue events with the first `count` tokens of a request, or with all its tokens."""
        tokens = range(first, first + self.requests[request_id].max_tokens)
        text = "".join(chr(97 + token) for token in tokens)
        output = Output(request_id, tokens=list(tokens), text=text, reason="length")
        for start in range(0, count or len(tokens), self.tokens_per_event):
            end = start + self.tokens_per_event
            is_last = count is None and end >= len(tokens)
            committed = tuple(tokens[start:end])
            logprobs = tuple(Logprob(-token, ()) for token in committed)
            event = Event(
                request_id, committed, text[start:end], output if is_last else None, logprobs
            )
            self.events.put_nowait(event)

    async def call(self, method, *arguments):
        if self.silence_s and method == "counters":
            return await asyncio.sleep(self.silence_s)
        answer = None
        if method == "start":
            answer = INFO
        if method == "counters":
            answer = {"requests": len(self.requests)}
        if method == "receive" or (method == "start" and not self.can_start):
            answer = [await self.events.get()]
        if method == "send":
            self.receive_jobs(arguments[0])
        if self.dead:
            raise OSError("killed")
        return answer

    def receive_jobs(self, jobs):
        for job in jobs:
            if isinstance(job, str):
                self.cancelled.append(job)
                continue
            self.requests[job.id] = job
            if job.priority == 13:
                self.kill()


@asynccontextmanager
async def fake_replicas(count=2, max_waiting=100, timeout_s=60.0):
    """Yield the `Replicas`, the list of all actors created so far, and the list of outputs."""
    FakeActor.instances = []
    outputs = []
    replicas = Replicas(FakeActor, None, count, max_waiting, timeout_s)
    await replicas.begin()
    replicas.start(outputs.append)
    try:
        yield replicas, FakeActor.instances, outputs
    finally:
        await replicas.stop()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose time passes only while no task can run, and then at once."""

    now_s = 1000.0

    def time(self):
        return self.now_s

    def _run_once(self):
        if self._scheduled and not self._ready:
            self.now_s = max(self.now_s, self._scheduled[0].when())
        super()._run_once()


async def receive(stream):
    """Read the stream of one request; return its tokens, text, log probabilities and output."""
    tokens = []
    text = ""
    logprobs = []
    async for _, event in stream:
        tokens += event.tokens
        text += event.text
        logprobs += event.logprobs or ()
    return tokens, text, [logprob.value for logprob in logprobs], event.output


async def settle():
    """Run the event loop until all tasks are blocked."""
    for _ in range(50):
        await asyncio.sleep(0)


def submit(replicas, name="a", **fields):
    """Submit a request with the id `name`, and return its stream."""
    fields = {"tokens": [1] * 20, "max_tokens": 9, "id": name} | fields
    return RequestStream(replicas, [Request(**fields)])


def test_replicas_restart_requests_of_dead_replica_without_gap():
    """When a replica dies, its requests restart on the other replica.

    The client receives each token exactly once. A restarted request has the same seed and the
    remaining time of its timeout. If a restarted request generates other tokens than before, the
    request ends with an error. A cancelled request is not restarted.
    """

    async def run():
        async with fake_replicas() as (replicas, actors, outputs):
            cancelled = submit(replicas, "cancelled")
            names = ("a", "b", "different")
            streams = {name: submit(replicas, name, timeout_s=9.0) for name in names}
            await settle()
            first = next(actor for actor in actors if "a" in actor.requests)
            assert first.requests.keys() == {"cancelled", *names}  # equal prompts
            cancelled.close()
            await settle()
            assert first.cancelled == ["cancelled"]
            assert outputs.pop().reason == "cancelled"
            for name in ("a", "different"):
                first.generate(name, 4)
            await settle()
            first.kill()
            await settle()
            assert replicas.alive == [True, True] and len(actors) == 3
            [second] = [actor for actor in actors if "a" in actor.requests and actor is not first]
            assert second.requests.keys() == set(names)
            assert second.requests["a"].seed == first.requests["a"].seed is not None
            assert 0 < second.requests["a"].timeout_s < 9.0
            second.generate("a")
            second.generate("b")
            second.generate("different", first=1)
            for name in ("a", "b"):
                tokens, text, logprobs, output = await receive(streams[name])
                assert tokens == list(range(9))
                assert text == "abcdefghi"
                assert logprobs == [-i for i in range(9)]
                assert output.reason == "length"
            tokens, _, _, output = await receive(streams["different"])
            assert output.error_type == "EngineError"
            assert tokens == list(range(len(tokens)))
            [counters, _] = await replicas.counters()
            assert counters == {"requests": len(replicas._replicas[0].actor.requests)}
            assert not replicas.open_requests
            assert [output.id for output in outputs] == list(names)

    asyncio.run(run())


def test_replicas_isolate_request_that_kills_engines():
    """A request that crashes its engine ends with an error after three engines have died.

    All other requests complete, including requests that ran on the same replicas.
    """

    async def run():
        async with fake_replicas() as (replicas, actors, ended):
            streams = [submit(replicas, str(i), priority=13 * (i == 2)) for i in range(6)]
            for _ in range(10):
                await settle()
            while replicas.open_requests:
                for replica in replicas._replicas:
                    for name in replica.actor.requests:
                        if name in replicas._requests:
                            replica.actor.generate(name)
                await settle()
            outputs = [(await receive(stream))[3] for stream in streams]
            reasons = [output.reason for output in outputs]
            assert reasons == ["length"] * 2 + ["error"] + ["length"] * 3
            assert outputs[2].error.startswith("3 engines died")
            assert len(actors) == 2 + SUSPECT_DEATHS + 1
            assert len(ended) == 6

    asyncio.run(run())


def test_replicas_queue_requests_while_restarting_and_fail_them_if_restart_fails(monkeypatch):
    """While no replica is alive, new requests wait in the queue; if the queue is full, they fail.

    If the restart of the replica fails too, all waiting requests fail. `Replicas.stop` cancels
    waiting requests.
    """

    async def run():
        async with fake_replicas(1) as (replicas, _, _):
            stream = submit(replicas)
        assert (await receive(stream))[3].reason == "cancelled"
        async with fake_replicas(1, max_waiting=1) as (replicas, actors, _):
            monkeypatch.setattr(FakeActor, "can_start", False)
            actors[0].kill()
            await settle()
            streams = [submit(replicas, str(i)) for i in range(6)]
            assert replicas.alive == [False]
            assert replicas.failure is None
            assert (await receive(streams[5]))[3].error_type == "QueueFullError"
            actors[1].kill()
            await settle()
            assert replicas.failure == "killed"
            assert replicas.open_requests == 0
            assert {(await receive(stream))[3].error for stream in streams[:5]} == {"killed"}
            assert (await receive(submit(replicas, "late")))[3].error == "killed"

    asyncio.run(run())


@pytest.mark.parametrize("timeout_s", ["5", [5], 10**400, -5, 0, float("nan"), True])
def test_replicas_refuse_invalid_timeout_without_storing_the_request(timeout_s):
    """A stored request with such a timeout could neither be started nor be removed."""

    async def run():
        async with fake_replicas(1) as (replicas, actors, _):
            with pytest.raises(OptionError, match="timeout_s must be"):
                submit(replicas, timeout_s=timeout_s)
            assert not replicas.open_requests
            actors[0].kill()
            await settle()
            assert replicas.alive == [True] and len(actors) == 2

    asyncio.run(run())


@pytest.mark.parametrize("silence_s", [9.0, 0.01])
def test_replicas_restart_replica_that_does_not_answer(monkeypatch, silence_s):
    """If a replica does not answer, it is restarted, and its request restarts on the other one.

    In one case, the process of the replica does not answer. In the other case, the process reports
    that its engine does not answer. After half of the timeout, the replica does not count as alive.
    """

    async def run():
        async with fake_replicas(timeout_s=1.0) as (replicas, actors, _):
            stream = submit(replicas)
            await settle()
            actors[0].silence_s = silence_s
            actors[0].generate("a", 3)
            await asyncio.sleep(0.75)
            assert replicas.alive == [False, True]
            assert not actors[0].dead
            await asyncio.sleep(0.75)
            assert actors[0].dead and not actors[1].dead
            assert len(actors) == 3
            actors[1].generate("a")
            assert (await receive(stream))[0] == list(range(9))

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        clock = SimpleNamespace(monotonic=runner.get_loop().time)
        monkeypatch.setattr(replicas_module, "time", clock)
        runner.run(run())


class LocalActor:
    """A handle of a `ReplicaActor` that runs in this process instead of a Ray process."""

    def __init__(self):
        self.actor = ReplicaActor()

    async def call(self, method, *arguments):
        return await getattr(self.actor, method)(*arguments)

    def kill(self):
        self.end = asyncio.ensure_future(self.actor._driver.stop())


def test_replica_actor_returns_engine_outputs_and_reports_engine_failure(engine, monkeypatch):
    [expected] = engine.generate([Request(tokens=[1] * 20, max_tokens=9)])

    def fail():
        raise RuntimeError("the device burns")

    async def run():
        replicas = Replicas(LocalActor, lambda: engine, 1, 100, timeout_s=60.0)
        await replicas.begin()
        replicas.start(lambda _output: None)
        tokens, text, _, output = await receive(submit(replicas))
        assert (tokens, text) == (expected.tokens, expected.text)
        assert output.reason == expected.reason
        monkeypatch.setattr(engine, "step", fail)
        output = (await receive(submit(replicas)))[3]
        assert output.error == (
            "3 engines died while they ran the request; error of the last one: the device burns"
        )
        await replicas.stop()
        replicas._replicas[0].actor.kill()
        await replicas._replicas[0].actor.end

    asyncio.run(run())
    monkeypatch.undo()
    for name in list(engine._scheduler.unfinished):
        engine.cancel(name)
    while engine.busy:
        engine.step()


def find_processes(mark):
    """Return the command lines, by process id, of processes whose environment contains `mark`."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().decode()
        except OSError:
            continue  # the process has ended
    return found


@contextmanager
def serve_replicas(*options):
    """Run ``graft serve`` with two replicas.

    Yields the URL, and a random text by which `find_processes` finds all processes of the server.
    """
    mark = secrets.token_hex(16)
    command = [
        sys.executable,
        "-m",
        "graft.tools.cli",
        "serve",
        "--port",
        "0",
        "--replicas",
        "2",
        "--name",
        "demo",
        *options,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"GRAFT_MARK": mark}
    ) as process:
        try:
            yield process.stdout.readline().split(" at ")[1].strip(), mark.encode()
        finally:
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
            assert process.wait() == 0


def listening_addresses(pids):
    """Return the local addresses, in the format of /proc/net/tcp, on which processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue  # the file has been closed
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # 0A: the state LISTEN
                addresses.add(fields[1].split(":")[0])
    return addresses


def test_private_folder_is_readable_by_its_user_only_and_deleted_after_an_error():
    with pytest.raises(OSError, match="no"), private_folder() as folder:
        os.chmod(folder, 0o777)
        (Path(folder) / "file").write_text("")
        parent = Path(folder).parent
        assert stat.S_IMODE(parent.stat().st_mode) == 0o700
        raise OSError("no")
    assert not parent.exists()


@pytest.mark.full
@pytest.mark.skipif(find_spec("ray") is None, reason="the extra replicas is not installed")
def test_serve_replicas_listen_on_loopback_addresses():
    """IPv4 and IPv6 addresses of /proc/net/tcp end with 0100007F for 127.0.0.1."""
    with serve_replicas() as (_, mark):
        addresses = listening_addresses(find_processes(mark))
    assert len(addresses) == 2
    assert all(address.endswith("0100007F") for address in addresses)


@pytest.mark.full
@pytest.mark.skipif(find_spec("ray") is None, reason="the extra replicas is not installed")
@pytest.mark.parametrize("count", [80, 1000])
def test_serve_replicas_survive_kill_of_one_replica(count):
    """One of two replicas is killed under a load of 32 concurrent requests.

    Each response equals the response to the same request sent alone. After the restart, both
    replicas are available, and no slot is in use. SIGTERM terminates all processes.
    """
    httpx = pytest.importorskip("httpx")
    util = pytest.importorskip("serving_util")
    requests = util.load_requests()

    def kill(number):
        if number == count // 2:
            found = find_processes(mark)
            actors = [pid for pid, name in found.items() if name.startswith("ray::ReplicaActor")]
            os.kill(min(actors), signal.SIGKILL)

    with serve_replicas() as (url, mark):
        root = url.removesuffix("/v1")
        results = asyncio.run(util.run_load(url, requests, count, kill))
        healthy = {"status": "ok", "live": 2, "replicas": 2}
        util.wait_for(lambda: httpx.get(f"{root}/health", timeout=60).json() == healthy, 120)
        sequential = util.run_sequentially(url, requests)
        page = httpx.get(f"{root}/metrics", timeout=60).text
    util.wait_for(lambda: not find_processes(mark))
    util.check_load(requests, sequential, results)
    gauges = re.findall(r"^graft_(?:slots|calls|requests_waiting)(?:{.*})? (.*)", page, re.M)
    assert gauges == ["0.0"] * 4
