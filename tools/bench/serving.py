"""What callers of an endpoint wait for: calls that arrive at random, at several rates.

    python -m graft.tools.bench.serving [--url URL] [--rates 1 2 4 8] [--calls 100] [--out FOLDER]

Without a URL it starts ``graft serve`` with the demo model. Calls are held-out tasks of the demo
model under their schemas, streamed, and arrive as a Poisson process; nobody waits for another's
answer. Told per rate: time to first token, time per further token, and goodput, the answers a
second that came whole with both times within their limits. On the soft device they are times of a
CPU, and say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from graft.cudagraph.errors import OptionError
from graft.tools.bench.chart import chart
from graft.tools.demo_tasks import held_out_tasks
from graft.tools.report import program, table

#: Seconds that one answer may take before it counts as lost.
LATE_S = 120.0


@dataclass(frozen=True)
class Heard:
    """One call: seconds to the first and per further token, and whether the answer came whole."""

    first_s: float = 0.0
    token_s: float = 0.0
    whole: bool = False


def calls(count: int, model: str, seed: int) -> list[dict[str, Any]]:
    """Bodies of calls, each a task with its schema."""
    tasks = [task for task in held_out_tasks(2 * count, seed) if task.schema is not None]
    return [
        {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": 256,
            "messages": [{"role": "user", "content": task.text}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "task", "schema": task.schema},
            },
        }
        for task in tasks[:count]
    ]


async def hear(client: Any, body: dict[str, Any]) -> Heard:
    """Make a call and listen to the end."""
    begun = time.perf_counter()
    first = 0.0
    finish = None
    tokens = 0
    async with client.stream("POST", "chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            piece = json.loads(line.removeprefix("data: "))
            first = first or time.perf_counter() - begun
            tokens = piece["usage"]["completion_tokens"] if piece.get("usage") else tokens
            for choice in piece.get("choices", ()):
                finish = choice["finish_reason"] or finish
    total = time.perf_counter() - begun
    return Heard(first, (total - first) / max(1, tokens - 1), finish == "stop")


async def arrivals(
    url: str, key: str, bodies: Sequence[dict[str, Any]], rate: float, seed: int
) -> tuple[list[Heard], float]:
    """Make calls as they arrive, so many a second; what was heard, and in how many seconds."""
    import httpx

    draw = random.Random(seed)
    begun = time.perf_counter()
    bar = tqdm(total=len(bodies), desc=f"{rate:g} calls a second", disable=None)

    async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> Heard:
        try:
            async with asyncio.timeout(LATE_S):
                heard = await hear(client, body)
        except (httpx.HTTPError, TimeoutError):
            heard = Heard()
        bar.update()
        return heard

    with bar:
        async with (
            httpx.AsyncClient(
                base_url=f"{url.rstrip('/')}/",
                timeout=None,
                headers={"authorization": f"Bearer {key}"},
                limits=httpx.Limits(max_connections=None),
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            tasks = []
            for body in bodies:
                tasks.append(group.create_task(one(client, body)))
                await asyncio.sleep(draw.expovariate(rate))
    return [task.result() for task in tasks], time.perf_counter() - begun


@contextmanager
def demo_server() -> Iterator[str]:
    """The URL of ``graft serve`` with the demo model, in a process of its own."""
    command = [sys.executable, "-m", "graft.tools.cli", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = process.stdout.readline() if process.stdout else ""
            if " at " not in said:
                raise OptionError("graft serve did not come up")
            yield said.split(" at ")[1].strip()
        finally:
            process.terminate()
            left = process.wait()
    if left:
        raise OptionError(f"graft serve ended with status {left}")


def figures(
    rate: float, heard: Sequence[Heard], seconds: float, first_s: float, token_s: float
) -> dict[str, Any]:
    """What one rate brought; times are of answers that came whole."""
    whole = [one for one in heard if one.whole]
    good = [one for one in whole if one.first_s <= first_s and one.token_s <= token_s]

    def quantiles(name: str) -> dict[str, float]:
        values = sorted(asdict(one)[name] * 1e3 for one in whole) or [0.0]
        return {"p50": statistics.median(values), "p99": values[int(0.99 * (len(values) - 1))]}

    return {
        "rate": rate,
        "calls": len(heard),
        "whole": len(whole),
        "seconds": seconds,
        "first_ms": quantiles("first_s"),
        "token_ms": quantiles("token_s"),
        "goodput": len(good) / seconds,
    }


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write figures and a plot."""
    parser = argparse.ArgumentParser(
        prog="python -m graft.tools.bench.serving", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--url", help="of an endpoint, with its /v1 (default: of the demo model)")
    parser.add_argument("--model", default="graft-demo", help="its name (default %(default)s)")
    parser.add_argument("--key", default="-", help="the endpoint's API key")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1, 2, 4, 8], help="calls a second"
    )
    parser.add_argument("--calls", type=int, default=100, help="per rate (default %(default)s)")
    parser.add_argument("--first-ms", type=float, default=1000, help="limit (default %(default)g)")
    parser.add_argument("--token-ms", type=float, default=100, help="limit (default %(default)g)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for serving.json and serving.svg")
    options = parser.parse_args(arguments)
    if min(*options.rates, options.calls) <= 0:
        parser.error("--rates and --calls must be above 0")
    found = []
    with demo_server() if options.url is None else nullcontext(options.url) as url:
        bodies = calls(options.calls, options.model, options.seed)
        asyncio.run(arrivals(url, options.key, bodies[:8], 8.0, options.seed))  # not counted
        for rate in options.rates:
            heard, took = asyncio.run(arrivals(url, options.key, bodies, rate, options.seed))
            found.append(figures(rate, heard, took, options.first_ms / 1e3, options.token_ms / 1e3))
    rows = [
        (
            f"{f['rate']:g}",
            f"{f['whole']}/{f['calls']}",
            *(f"{f[key][q]:.0f}" for key in ("first_ms", "token_ms") for q in ("p50", "p99")),
            f"{f['goodput']:.2f}",
        )
        for f in found
    ]
    print(table([("rate", "whole", "first p50", "p99", "token p50", "p99", "goodput"), *rows]))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "serving.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        lines = {
            "answers in time": [(f["rate"], f["goodput"]) for f in found],
            "all calls": [(f["rate"], f["rate"]) for f in found],
        }
        note = f"first token within {options.first_ms:g} ms, others {options.token_ms:g} ms each"
        (options.out / "serving.svg").write_text(
            chart("Goodput", note, "calls a second", "answers in time a second", lines),
            encoding="utf-8",
        )


if __name__ == "__main__":
    sys.exit(main())
