"""Benchmark of memory: anonymous memory and live device objects over thousands of requests.

    python -m graft.tools.bench.memory [--requests 10000] [--samples 20] [--json FILE]

The demo model with its EAGLE-3 head answers requests in batches of eight. Each request has its own
prompt and its own JSON schema, so each request compiles a grammar. The cache of compiled grammars
is limited to 4 MiB and is therefore full after the first few hundred requests.

The anonymous memory is that of this process. It does not include the processes that compile
grammars. The live device objects, such as allocations, graphs and events, are those that the soft
device counts.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from graft.cudagraph.errors import GraftError, OptionError
from graft.grammar import GrammarSpec
from graft.models.engine.engine import Engine
from graft.models.engine.options import InternalOptions
from graft.models.request import Request
from graft.tools.bench.harness import add_counts, finish, make_parser
from graft.tools.console import program, table
from graft.tools.demo_model import demo_model

BATCH = 8
DRAFT_LENGTH = 3
GRAMMAR_CACHE_BYTES = 4 << 20


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process, which is its memory without mapped files."""
    with Path("/proc/self/status").open(encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) << 10


def make_request(number: int) -> Request:
    """Return a request whose prompt and schema are different for each number."""
    properties = {f"field_{number}_{i}": {"type": "integer"} for i in range(10)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return Request(
        prompt=f"field_{number}_0: {number}",
        grammar=GrammarSpec.json_schema(schema),
        max_tokens=6,
        closing="off",
    )


def sample(engine: Engine, requests: int, samples: int) -> Iterator[dict[str, Any]]:
    """Run `requests` requests in `samples` parts, and yield the memory after each part.

    Raise GraftError if a request fails.
    """
    for part in range(samples):
        first, end = requests * part // samples, requests * (part + 1) // samples
        for output in engine.generate([make_request(number) for number in range(first, end)]):
            if output.error:
                raise GraftError(f"request {output.id} {output.reason}: {output.error}")
        engine.synchronize()
        gc.collect()
        live = engine.device.stats()["live"]
        yield {"requests": end, "anonymous_bytes": anonymous_bytes(), "live": live}


def measure(requests: int, samples: int) -> dict[str, Any]:
    """Return the content of the JSON file: the device and the series of samples."""
    # The value "auto" of prefill_rows builds graphs for further sizes when rounds are slow.
    with Engine(
        *demo_model(),
        max_batch_size=BATCH,
        draft_length=DRAFT_LENGTH,
        prefill_rows=16,
        internal=InternalOptions(grammar_cache_bytes=GRAMMAR_CACHE_BYTES),
    ) as engine:
        if engine.device.kind != "soft":
            raise OptionError("the benchmark needs the soft device, which counts live objects")
        series = list(tqdm(sample(engine, requests, samples), total=samples, disable=None))
        return {
            "device": engine.device.describe(),
            "batch": BATCH,
            "draft_length": DRAFT_LENGTH,
            "grammar_cache_bytes": GRAMMAR_CACHE_BYTES,
            "series": series,
        }


def make_report(results: dict[str, Any]) -> str:
    """Return a table with one line per sample."""
    rows: list[tuple[object, ...]] = [("requests", "anonymous MiB", "live device objects")]
    for one in results["series"]:
        objects = sum(one["live"].values())
        rows.append((one["requests"], f"{one['anonymous_bytes'] / 2**20:.1f}", objects))
    return f"device: {results['device']}\n{table(rows)}"


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = make_parser("graft.tools.bench.memory", __doc__)
    add_counts(
        parser, ("requests", 10_000, "requests"), ("samples", 20, "samples, evenly distributed")
    )
    options = parser.parse_args(arguments)
    if options.samples > options.requests:
        parser.error(f"--samples must be at most --requests, {options.requests}")
    results = measure(options.requests, options.samples)
    finish(options, results, make_report(results))


if __name__ == "__main__":
    sys.exit(main())
