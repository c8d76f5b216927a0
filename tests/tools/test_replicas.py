"""Several engines behind one endpoint: who gets which call, and what becomes of a dead one's."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest

from graft.models.request import Event, Limits, Logprob, Output, Request
from graft.tools.demo_model import demo_model
from graft.tools.serve.actors import Worker
from graft.tools.serve.app import Caller
from graft.tools.serve.driver import Facts
from graft.tools.serve.replicas import SUSPECT, Replicas
from graft.tools.serve.router import Router

FACTS = Facts(demo_model()[0], Limits(), 4, 16, 64)


def test_prompts_go_where_their_beginning_has_been_and_else_to_the_idlest():
    """Longest shared prefix first, then load; a full batch is not waited behind, and what an engine
    cannot keep any more, or lost when it died, is forgotten."""
    router = Router(2, FACTS)
    first = list(range(40))
    other = list(range(100, 140))
    keys = router.keys(first)
    assert len(keys) == 2 and router.keys(first[:32]) == keys[:1]
    assert len(router.keys([[]] * 40)) == 2  # an engine refuses them
    assert router.keys([*first[:16], *other])[:1] == keys[:1] != router.keys(other)[:1]
    assert router.choose(keys, {0: 1, 1: 0}) == 1  # nobody knows it
    assert router.choose(keys, {0: 0, 1: 3}) == 1  # where it has been
    assert router.choose(keys, {0: 0, 1: 4}) == 0  # that one is a batch behind
    assert router.choose(keys, {0: 1, 1: 0}) == 1  # both know it
    assert router.choose(router.keys([*first[:16], *other]), {0: 0, 1: 3}) == 0
    assert router.choose(keys, {1: 9}) == 1
    router.choose(router.keys(list(range(1000, 3000))), {1: 0})  # of which 64 pages are kept
    assert router.choose(keys, {0: 3, 1: 0}) == 0
    router.forget(0)
    assert router.choose(keys, {0: 3, 1: 0}) == 1


class Told:
    """An engine that tells a request's tokens 0, 1, 2, ..., in steps that are its own, and a letter
    each; it dies when told to, or by a request of priority 13."""

    made: ClassVar[list[Told]] = []
    comes = True

    def __init__(self):
        self.asked: dict[str, Request] = {}
        self.cancelled: list[str] = []
        self.dead = False
        self.silent = 0.0
        self.events: asyncio.Queue[Event | None] = asyncio.Queue()
        self.step = 1 + len(self.made) % 3
        self.made.append(self)

    def kill(self):
        self.dead = True
        self.events.put_nowait(None)

    def run(self, name, most=None, first=0):
        """Tell a request's tokens, up to so many or to its end."""
        tokens = range(first, first + self.asked[name].max_tokens)
        text = "".join(chr(97 + token) for token in tokens)
        for at in range(0, most or len(tokens), self.step):
            told = tuple(tokens[at : at + self.step])
            ends = most is None and at + self.step >= len(tokens)
            self.events.put_nowait(
                Event(
                    name,
                    told,
                    text[at : at + self.step],
                    Output(name, tokens=list(tokens), text=text, reason="length") if ends else None,
                    tuple(Logprob(-token, ()) for token in told),
                )
            )

    async def call(self, name, *given):
        if self.silent and name == "counters":
            return await asyncio.sleep(self.silent)
        answer = {"begin": FACTS, "counters": {"asked": len(self.asked)}}.get(name)
        if name == "events" or (name == "begin" and not self.comes):
            answer = [await self.events.get()]
        for job in given[0] if name == "tell" else ():
            if isinstance(job, str):
                self.cancelled.append(job)
                continue
            self.asked[job.id] = job
            if job.priority == 13:
                self.kill()
        if self.dead:
            raise OSError("killed")
        return answer


@asynccontextmanager
async def fakes(count=2, waiting=100):
    """Replicas whose engines only tell, the engines (restarted ones too), and what has ended."""
    Told.made = []
    ended = []
    replicas = Replicas(Told, None, count, waiting)
    await replicas.begin()
    replicas.start(ended.append)
    try:
        yield replicas, Told.made, ended
    finally:
        await replicas.stop()


async def heard(exchange):
    """All tokens, texts and log probabilities of a call's one request, and its output."""
    tokens = []
    text = ""
    logprobs = []
    async for _, event in exchange:
        tokens = [*tokens, *event.tokens]
        text = text + event.text
        logprobs += event.logprobs or ()
    return tokens, text, [one.value for one in logprobs], event.output


async def turn():
    """Let everybody come to rest."""
    for _ in range(50):
        await asyncio.sleep(0)


def ask(replicas, name="a", **fields):
    """A request under way."""
    fields = {"tokens": [1] * 20, "max_tokens": 9, "id": name} | fields
    return Caller(replicas, [Request(**fields)])


def test_callers_of_an_engine_that_dies_hear_on_where_they_were():
    """Nothing is said twice or left out, by the same seed, in less time; an answer that comes out
    otherwise is an error; who has left is not begun anew, and the others go on unharmed."""

    async def run():
        async with fakes() as (replicas, engines, ended):
            gone = ask(replicas, "gone")
            calls = {name: ask(replicas, name, timeout_s=9.0) for name in ("a", "b", "other")}
            await turn()
            engine = next(e for e in engines if "a" in e.asked)
            assert engine.asked.keys() == {"gone", "a", "b", "other"}  # of one prompt
            gone.close()
            await turn()
            assert engine.cancelled == ["gone"] and ended.pop().reason == "cancelled"
            for name in ("a", "other"):
                engine.run(name, 4)
            await turn()
            engine.kill()
            await turn()
            assert replicas.live == [True, True] and len(engines) == 3
            [second] = [e for e in engines if "a" in e.asked and e is not engine]
            assert second.asked.keys() == {"a", "b", "other"}
            assert second.asked["a"].seed == engine.asked["a"].seed is not None
            assert 0 < second.asked["a"].timeout_s < 9.0
            second.run("a")
            second.run("b")
            second.run("other", first=1)
            for name in ("a", "b"):
                said = await heard(calls[name])
                assert said[:3] == (list(range(9)), "abcdefghi", [-i for i in range(9)])
                assert said[3].reason == "length"
            tokens, _, _, output = await heard(calls["other"])
            assert output.error_type == "EngineError" and tokens == list(range(len(tokens)))
            assert (await replicas.counters())[0] == {
                "asked": len(replicas._replicas[0].actor.asked)
            } and not replicas.open
            assert [o.id for o in ended] == ["a", "b", "other"]

    asyncio.run(run())


def test_a_call_that_kills_its_engines_is_found_and_ends_alone():
    """It ends by an error after its third engine; all others are answered, however often they were
    beside it."""

    async def run():
        async with fakes() as (replicas, engines, ended):
            calls = [ask(replicas, str(i), priority=13 * (i == 2)) for i in range(6)]
            for _ in range(10):
                await turn()
            while replicas.open:
                for engine in [one.actor for one in replicas._replicas]:
                    for name in [n for n in engine.asked if n in replicas._calls]:
                        engine.run(name)
                await turn()
            outputs = [(await heard(call))[3] for call in calls]
            assert [o.reason for o in outputs] == ["length"] * 2 + ["error"] + ["length"] * 3
            assert outputs[2].error.startswith("3 engines died")
            assert len(engines) == 2 + SUSPECT + 1 and len(ended) == 6

    asyncio.run(run())


def test_without_any_engine_calls_wait_for_as_long_as_there_is_hope(monkeypatch):
    """While an engine comes up calls wait; when none does they end by its error; a queue that is
    full, or is left, tells so."""

    async def run():
        async with fakes(1) as (replicas, _, _):
            left = ask(replicas)
        assert (await heard(left))[3].reason == "cancelled"
        async with fakes(1, waiting=1) as (replicas, engines, _):
            monkeypatch.setattr(Told, "comes", False)
            engines[0].kill()
            await turn()
            calls = [ask(replicas, str(i)) for i in range(6)]
            assert replicas.live == [False] and replicas.failure is None
            assert (await heard(calls[5]))[3].error_type == "QueueFullError"
            engines[1].kill()
            await turn()
            assert replicas.failure == "killed" and replicas.open == 0
            assert {(await heard(call))[3].error for call in calls[:5]} == {"killed"}
            assert (await heard(ask(replicas, "late")))[3].error == "killed"

    asyncio.run(run())


@pytest.mark.parametrize("silent", [9.0, 0.01])
def test_an_engine_that_answers_nothing_has_died(monkeypatch, silent):
    """Be it that nothing comes or that the worker says so; its call goes on at another."""
    monkeypatch.setattr("graft.tools.serve.replicas.SILENT_S", 0.2)

    async def run():
        async with fakes() as (replicas, engines, _):
            call = ask(replicas)
            await turn()
            engines[0].silent = silent
            engines[0].run("a", 3)
            await asyncio.sleep(1)
            assert engines[0].dead and not engines[1].dead and len(engines) == 3
            engines[1].run("a")
            assert (await heard(call))[0] == list(range(9))

    asyncio.run(run())


class Here:
    """A worker in this process."""

    def __init__(self):
        self.worker = Worker()

    async def call(self, name, *given):
        return await getattr(self.worker, name)(*given)

    def kill(self):
        self.end = asyncio.ensure_future(self.worker._driver.stop())


def test_a_worker_answers_as_its_engine_does_until_that_fails(engine, monkeypatch):
    """Through it tokens are the engine's own, and an engine that has failed has died."""
    [own] = engine.generate([Request(tokens=[1] * 20, max_tokens=9)])

    def fail():
        raise RuntimeError("the device burns")

    async def run():
        replicas = Replicas(Here, lambda: engine, 1, 100)
        await replicas.begin()
        replicas.start(lambda _output: None)
        tokens, text, _, output = await heard(ask(replicas))
        assert (tokens, text, output.reason) == (own.tokens, own.text, own.reason)
        monkeypatch.setattr(engine, "step", fail)
        output = (await heard(ask(replicas)))[3]
        assert output.error == (
            "3 engines died while they had the request, the last by: the device burns"
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


def processes(mark):
    """Ids and command lines of processes whose environment has a mark."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().decode()
        except OSError:
            continue  # it has ended
    return found


@contextmanager
def replicas_of_demo(*options):
    """The URL of ``graft serve`` with two replicas, and the mark of its processes."""
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


@pytest.mark.full
@pytest.mark.skipif(find_spec("ray") is None, reason="the extra replicas is not installed")
@pytest.mark.parametrize("count", [80, 1000])
def test_a_killed_replica_loses_no_call(count):
    """Of calls 32 at once, during which a replica gets kill -9, every one is answered as alone;
    then both are there again, nothing is held, and SIGTERM leaves no process behind."""
    httpx = pytest.importorskip("httpx")
    util = pytest.importorskip("serving_util")
    asked = util.crowd()

    def kill(number):
        if number == count // 2:
            workers = [i for i, name in processes(mark).items() if name.startswith("ray::Worker")]
            os.kill(min(workers), signal.SIGKILL)

    with replicas_of_demo() as (url, mark):
        root = url.removesuffix("/v1")
        said = asyncio.run(util.heard_by_crowd(url, asked, count, kill))
        util.wait_for(
            lambda: (
                httpx.get(f"{root}/health").json() == {"status": "ok", "live": 2, "replicas": 2}
            ),
            120,
        )
        lone = util.alone(url, asked)
        page = httpx.get(f"{root}/metrics").text
    util.wait_for(lambda: not processes(mark))
    util.check_crowd(asked, lone, said)
    held = re.findall(r"^graft_(?:slots|calls|requests_waiting)(?:{.*})? (.*)", page, re.M)
    assert held == ["0.0"] * 4
