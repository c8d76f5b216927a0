"""Benchmark of an OpenAI-compatible endpoint: latencies and goodput by request rate.

    python -m graft.tools.bench.serving [--url URL] [--rates 1 2 4 8] [--calls 100] [--json FILE]
        [--chart FILE]

Without a URL, the benchmark starts ``graft serve`` with the demo model. The requests are held-out
tasks of the demo model with their schemas, and the responses are streamed. Requests are sent as a
Poisson process that does not wait for earlier responses (open loop).

The latencies are the time to first token (TTFT) and the mean time per output token. A response is
in time if both latencies are within their limits. Goodput is the number of complete responses in
time, divided by the time during which requests were sent. If all responses are in time, goodput
equals the rate at which the requests were sent. Times measured on the soft device are those of a
CPU and say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from graft.cudagraph.errors import OptionError
from graft.tools.bench.harness import Chart, add_chart_option, finish, make_parser, number_from
from graft.tools.console import program, table
from graft.tools.demo.tasks import held_out_tasks

#: Seconds after which a request counts as failed.
TIMEOUT_S = 120.0
WARM_UP_REQUESTS = 8
WARM_UP_RATE = 8.0


@dataclass(frozen=True)
class Response:
    """Latencies of one request. A failed request has no latencies, and may have an error."""

    first_token_s: float = 0.0  #: time to first token
    token_s: float = 0.0  #: mean time per output token after the first one
    complete: bool = False  #: whether the response ended with finish reason "stop"
    error: str = ""


def make_bodies(count: int, model: str, seed: int) -> list[dict[str, Any]]:
    """Return `count` request bodies, each with one task and its JSON schema.

    `model` is the name of the model in the requests, and `seed` selects the tasks.
    """
    tasks = [task for task in held_out_tasks(2 * count, seed) if task.schema is not None]
    bodies = []
    for task in tasks[:count]:
        body: dict[str, Any] = {
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
        bodies.append(body)
    return bodies


async def send(client: Any, body: dict[str, Any]) -> Response:
    """Send a request and read its stream to the end. Return its latencies."""
    start = time.perf_counter()
    first_token_s = 0.0
    finish_reason = None
    tokens = 0
    async with client.stream("POST", "chat/completions", json=body) as stream:
        if stream.status_code != 200:
            text = (await stream.aread()).decode(errors="replace")
            return Response(error=f"status {stream.status_code}: {text:.500}")
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            first_token_s = first_token_s or time.perf_counter() - start
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
            for choice in chunk.get("choices", ()):
                finish_reason = choice["finish_reason"] or finish_reason
    total_s = time.perf_counter() - start
    token_s = (total_s - first_token_s) / max(1, tokens - 1)
    return Response(first_token_s, token_s, finish_reason == "stop")


async def send_all(
    url: str, key: str, bodies: Sequence[dict[str, Any]], rate: float, seed: int
) -> tuple[list[Response], float, float]:
    """Send requests as a Poisson process and wait for all responses.

    `rate` is the mean number of requests per second, and `seed` determines the arrival times.
    Return the responses in the order of the bodies, the seconds during which requests were sent,
    and the seconds until the last response.
    """
    import httpx

    rng = random.Random(seed)
    start = time.perf_counter()
    bar = tqdm(total=len(bodies), desc=f"{rate:g} requests/s", disable=None)

    async def send_one(client: httpx.AsyncClient, body: dict[str, Any]) -> Response:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                response = await send(client, body)
        except (httpx.HTTPError, TimeoutError) as error:
            response = Response(error=f"{type(error).__name__}: {error}")
        bar.update()
        return response

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
                tasks.append(group.create_task(send_one(client, body)))
                await asyncio.sleep(rng.expovariate(rate))
            sending_s = time.perf_counter() - start
    return [task.result() for task in tasks], sending_s, time.perf_counter() - start


@contextmanager
def demo_server() -> Iterator[str]:
    """Run ``graft serve`` with the demo model in a child process and yield its URL."""
    command = [sys.executable, "-m", "graft.tools.cli", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            if " at " not in line:
                raise OptionError("graft serve did not start; its error output is printed above")
            yield line.split(" at ")[1].strip()
        finally:
            process.terminate()
            status = process.wait()
    if status:
        raise OptionError(f"graft serve exited with status {status}")


# Figures ------------------------------------------------------------------------------------------


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50 and p99 in milliseconds. Both are 0 if there are no values."""
    values = sorted(value * 1e3 for value in seconds) or [0.0]
    p99_index = int(0.99 * (len(values) - 1))
    return {"p50": statistics.median(values), "p99": values[p99_index]}


def summarize(
    rate: float,
    responses: Sequence[Response],
    sending_s: float,
    seconds: float,
    limits_s: tuple[float, float],
) -> dict[str, Any]:
    """Return the results at one request rate. Only complete responses count for the latencies.

    `sending_s` and `seconds` are described in `send_all`. `limits_s` has the maximum TTFT and the
    maximum time per output token of a response that counts for goodput.
    """
    first_token_limit_s, token_limit_s = limits_s
    complete = [one for one in responses if one.complete]
    in_time = [
        one
        for one in complete
        if one.first_token_s <= first_token_limit_s and one.token_s <= token_limit_s
    ]
    return {
        "rate": rate,
        "requests": len(responses),
        "complete": len(complete),
        "seconds": seconds,
        "first_token_ms": quantiles_ms([one.first_token_s for one in complete]),
        "token_ms": quantiles_ms([one.token_s for one in complete]),
        "sent_per_s": len(responses) / sending_s,
        "goodput": len(in_time) / sending_s,
    }


def results_table(results: Sequence[dict[str, Any]]) -> str:
    """Return a table with one line per rate."""
    rows = [
        ("requests/s", "complete", "TTFT ms p50", "p99", "ms per token p50", "p99", "goodput/s")
    ]
    for one in results:
        rows.append(
            (
                f"{one['rate']:g}",
                f"{one['complete']}/{one['requests']}",
                f"{one['first_token_ms']['p50']:.0f}",
                f"{one['first_token_ms']['p99']:.0f}",
                f"{one['token_ms']['p50']:.0f}",
                f"{one['token_ms']['p99']:.0f}",
                f"{one['goodput']:.2f}",
            )
        )
    return table(rows)


def make_chart(results: Sequence[dict[str, Any]]) -> Chart:
    """Return the chart of goodput by request rate."""
    series = {
        "goodput": [(one["rate"], one["goodput"]) for one in results],
        "all requests": [(one["rate"], one["sent_per_s"]) for one in results],
    }
    return Chart("Goodput", "requests/s", "complete responses in time per second", series)


# Program ------------------------------------------------------------------------------------------


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser("graft.tools.bench.serving", __doc__)
    add_chart_option(parser)
    parser.add_argument(
        "--url", help="base URL with /v1 (default: start a server with the demo model)"
    )
    parser.add_argument("--model", default="graft-demo", help="model name (default %(default)s)")
    parser.add_argument("--key", default="-", help="API key of the endpoint")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1, 2, 4, 8], help="requests per second"
    )
    parser.add_argument(
        "--calls", type=number_from(1), default=100, help="requests per rate (default %(default)s)"
    )
    parser.add_argument(
        "--first-ms", type=float, default=1000, help="limit of the TTFT (default %(default)g)"
    )
    parser.add_argument(
        "--token-ms",
        type=float,
        default=100,
        help="limit of the time per output token (default %(default)g)",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if min(options.rates) <= 0:
        parser.error(f"--rates must be above 0, not {min(options.rates):g}")
    return options


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure at all request rates, after a few warm-up requests that are not counted.

    Raise OptionError if all warm-up requests fail.
    """
    results = []
    with demo_server() if options.url is None else nullcontext(options.url) as url:
        bodies = make_bodies(options.calls, options.model, options.seed)
        warm_up = bodies[:WARM_UP_REQUESTS]
        warm, *_ = asyncio.run(send_all(url, options.key, warm_up, WARM_UP_RATE, options.seed))
        errors = [response.error for response in warm if response.error]
        if len(errors) == len(warm):
            raise OptionError(f"--url {url}: all warm-up requests failed: {errors[0]}")
        for rate in options.rates:
            sent = asyncio.run(send_all(url, options.key, bodies, rate, options.seed))
            limits_s = (options.first_ms / 1e3, options.token_ms / 1e3)
            results.append(summarize(rate, *sent, limits_s))
    return results


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = parse_options(arguments)
    if importlib.util.find_spec("httpx") is None:
        raise OptionError("the serving benchmark needs the package httpx: pip install httpx")
    results = measure(options)
    limits = f"TTFT at most {options.first_ms:g} ms, {options.token_ms:g} ms per output token"
    finish(options, results, results_table(results), [make_chart(results)], limits)


if __name__ == "__main__":
    sys.exit(main())
