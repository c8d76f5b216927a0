"""The endpoint's life: many at once, who leaves, what fails, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import re
import sys
import threading
from pathlib import Path

import pytest

from graft.tools import cli
from graft.tools.bench import serving as serving_bench
from graft.tools.serve.command import bound

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra serve is not installed")
openai = pytest.importorskip("openai", reason="the package openai is not installed")
httpx = pytest.importorskip("httpx", reason="the package httpx is not installed")

from serving_util import (  # noqa: E402
    PERSON,
    alone,
    ask,
    check_crowd,
    crowd,
    form,
    heard_by_crowd,
    serving,
    wait_for,
)

WEB = httpx.Client(verify=False)
LONG = {"prompt": "a", "max_tokens": 400, "logit_bias": {"3": -1000}, "temperature": 0}


def test_sixty_four_at_once_are_each_what_they_are_alone(engine, server):
    """Sampled and greedy, guided and free: everybody gets what they would get alone."""
    kinds = [{"seed": i, "temperature": 1.0} for i in range(4)] + [
        {"temperature": 0},
        {"response_format": form(PERSON)},
        {"structured_outputs": {"choice": ["red", "green"]}, "seed": 5, "temperature": 2.0},
    ]
    asked = list(itertools.islice(itertools.cycle(kinds), 64))

    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=server.url, api_key="key", max_retries=0) as made:
            return await asyncio.gather(*(ask(made, **fields, max_tokens=24) for fields in asked))

    texts = [said.choices[0].message.content for said in asyncio.run(all_at_once())]
    with openai.OpenAI(base_url=server.url, api_key="key") as made:
        alone = [ask(made, **fields, max_tokens=24).choices[0].message.content for fields in kinds]
    assert texts == list(itertools.islice(itertools.cycle(alone), 64))


@pytest.fixture
def turns(engine, monkeypatch):
    """The engine takes only as many steps as are released."""
    allowed = threading.Semaphore(0)
    step = engine.step

    def wait_and_step():
        allowed.acquire(timeout=30)
        return step()

    monkeypatch.setattr(engine, "step", wait_and_step)
    return allowed


def test_who_leaves_is_cancelled(server, client, turns):
    """A stream that is closed, and a call that is given up, free their rows."""

    def cancelled():
        page = WEB.get(f"{server.url.removesuffix('/v1')}/metrics").text
        found = re.search(r'reason="cancelled"\} (\d+)', page)
        return int(found[1]) if found else 0

    driver = server.service.driver
    before = cancelled()
    turns.release(4)
    stream = client.completions.create(model="demo", stream=True, **LONG)
    next(iter(stream))
    assert driver.open == 1
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(model="demo", **LONG)
    wait_for(lambda: server.service.calls == 0)
    assert driver.open == 0
    turns.release(1000)
    wait_for(lambda: cancelled() == before + 2)
    assert driver.open == 0


def test_a_full_house_says_so_and_a_leaving_one_ends_what_runs(engine, turns):
    """One call too many gets a 429; a server that leaves takes no more, and finishes the others."""
    with (
        serving(engine, waiting=-7) as server,
        openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client,
    ):
        turns.release(4)
        pieces = iter(client.completions.create(model="demo", stream=True, **LONG))
        next(pieces)
        with pytest.raises(openai.RateLimitError) as full:
            ask(client)
        assert full.value.response.headers["retry-after"] == "1"
        server.drain()
        with pytest.raises(openai.InternalServerError, match="leaving"):
            ask(client)
        assert WEB.get(f"{server.url.removesuffix('/v1')}/health").status_code == 503
        turns.release(1000)
        assert [piece.choices[0].finish_reason for piece in pieces][-1] == "length"


def test_who_is_not_done_when_the_server_leaves_is_told(engine, turns):
    """When the time to drain is up, a stream ends by an error."""
    with (
        serving(engine, drain_s=0.0) as server,
        openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client,
    ):
        turns.release(4)
        pieces = iter(client.completions.create(model="demo", stream=True, **LONG))
        next(pieces)
        server.drain()
        wait_for(lambda: server.should_exit)
        turns.release(1000)
        with pytest.raises(openai.APIError, match="the server is leaving"):
            list(pieces)


def test_a_failed_engine_ends_every_call_and_is_told(engine, monkeypatch):
    """Whoever waits gets an error, whoever comes a 503, and the pages say so."""

    def fail():
        raise RuntimeError("the device burns")

    with (
        serving(engine) as server,
        openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client,
    ):
        monkeypatch.setattr(engine, "step", fail)
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="the device burns") as caught:
                ask(client)
            assert caught.value.status_code == 503
        root = server.url.removesuffix("/v1")
        assert WEB.get(f"{root}/health").json() == {
            "status": "the device burns",
            "live": 0,
            "replicas": 1,
        }
        assert 'graft_up{replica="0"} 0.0' in WEB.get(f"{root}/metrics").text
    monkeypatch.undo()
    while engine.busy:
        [engine.cancel(name) for name in list(engine._scheduler.unfinished)]
        engine.step()


def test_the_command_names_what_it_lacks(monkeypatch, capsys):
    """Without the extra's packages, or with an address that is taken, it is one sentence."""
    with contextlib.closing(bound("127.0.0.1", 0)) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", "--port", port]) == 2
    assert f"--port {port}: " in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    for options, words in (
        ([], "the package ray: pip install 'graft-cuda[replicas]'"),
        (["--verify", "rejection"], "their --verify coupled"),
    ):
        assert cli.main(["serve", "--port", "0", "--replicas", "2", *options]) == 2
        assert words in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "graft.tools.serve.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["serve"]) == 2
    assert "the package uvicorn: pip install 'graft-cuda[serve]'" in capsys.readouterr().err


@pytest.mark.full
def test_the_bench_hears_whole_answers_of_a_server_that_leaves_when_told(tmp_path, capsys):
    """Every call of every rate is answered whole by ``graft serve``, which SIGTERM ends by 0; what
    is told fits together."""
    assert serving_bench.main(["--rates", "2", "4", "--calls", "6", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "serving.json").read_text())
    assert [(f["rate"], f["whole"], f["calls"]) for f in found] == [(2, 6, 6), (4, 6, 6)]
    for one in found:
        assert 0 < one["first_ms"]["p50"] <= one["first_ms"]["p99"] < one["seconds"] * 1e3
        assert one["goodput"] <= 6 / one["seconds"]
    assert "Goodput" in (tmp_path / "serving.svg").read_text()
    assert "6/6" in capsys.readouterr().out


def held(engine):
    """What a process and an engine hold: files, threads, children, slots and pages; and bytes."""
    engine.settle()
    threads = sorted(thread.name for thread in threading.enumerate())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len(os.listdir("/proc/self/fd"))
    return (files, threads, engine.counters()["held"]), pages * os.sysconf("SC_PAGESIZE")


@pytest.mark.full
def test_a_thousand_calls_get_what_they_get_alone_and_leave_nothing(engine):
    """32 at once, a tenth given up and a twentieth wrong: every answer is that of its lone run,
    guided ones that ended are valid, and files, threads, slots, pages and memory stay."""
    asked = crowd()
    with serving(engine) as server:
        lone = alone(server.url, asked)
        asyncio.run(heard_by_crowd(server.url, asked, 200))
        wait_for(lambda: server.service.driver.open == 0)
        before, bytes_before = held(engine)
        heard = asyncio.run(heard_by_crowd(server.url, asked, 1000))
        wait_for(lambda: server.service.driver.open == 0)
        gc.collect()
        after, bytes_after = held(engine)
    check_crowd(asked, lone, heard)
    assert after == before
    assert bytes_after - bytes_before < 24 << 20
