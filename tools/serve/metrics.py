"""Prometheus metrics of the server: its requests, and the counters of its engines.

The counters count decoding rounds. A round is one launch of an engine's CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from graft.models.request import Output

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
#: Counters as tuples of metric name, description, group and key. The value of a counter is
#: ``Engine.counters()[group][key]``.
_COUNTERS = (
    ("graft_rounds", "Decoding rounds.", "engine", "rounds"),
    ("graft_request_rounds", "Decoding rounds, summed over requests.", "engine", "row_rounds"),
    ("graft_tokens", "Committed tokens.", "engine", "tokens"),
    ("graft_preemptions", "Preemptions of requests.", "engine", "preemptions"),
    ("graft_grammar_fills", "Token bitmasks filled by grammars.", "grammar", "fills"),
    (
        "graft_grammar_late_rows",
        "Rounds that requests skipped because their token bitmask was not ready.",
        "grammar",
        "late_rows",
    ),
    (
        "graft_grammar_closed",
        "Requests from whose masks max_tokens has excluded tokens, so that the output is complete. "
        "A preempted request can count again. Requests with matchers in Python do not count.",
        "closing",
        "requests",
    ),
    ("graft_grammar_compiled", "Compiled grammars.", "compile", "compiled"),
    (
        "graft_prefix_hit_tokens",
        "Prompt tokens found in the prefix cache.",
        "prefixes",
        "hit_tokens",
    ),
    ("graft_prefix_evictions", "Pages evicted from the prefix cache.", "prefixes", "evictions"),
)
#: Gauges whose values the engines report, as tuples in the form of `_COUNTERS`.
_GAUGES = (
    ("graft_prefix_pages", "Pages in the prefix cache.", "prefixes", "pages"),
    ("graft_pages", "KV-cache pages of running requests.", "held", "pages"),
    ("graft_slots", "Request slots in use.", "held", "slots"),
    ("graft_grammar_cache_bytes", "Size of the grammar cache in bytes.", "compile", "cache_bytes"),
)
#: Descriptions of the gauges that the caller of `Metrics.page` provides.
_SERVER_GAUGES = {
    "calls": "API requests in progress.",
    "requests_waiting": "Engine requests that wait for a slot.",
}
#: Counters of rounds with a label besides ``replica``, as tuples of key, label and description.
_ROUND_COUNTERS = (
    ("rounds_by_kind", "kind", "Decoding rounds by kind of graph: host, device or loop."),
)
_DRAFT_COUNTERS = (
    ("tested", "Verified drafts by position."),
    ("accepted", "Accepted drafts by position."),
)
_HISTOGRAMS = (
    ("queue", "Seconds from submission until the request got a slot."),
    ("first_token", "Time to first token (TTFT) in seconds."),
    ("token", "Mean inter-token latency (ITL) of a request in seconds."),
    ("request", "Seconds from submission until the request ended."),
)


class Metrics:
    """The metrics of the server, in a Prometheus registry.

    Metrics of requests, such as latency histograms, are updated when a request ends. Metrics of the
    engines are computed from the counters that the caller passes to `page`.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._engines: dict[str, Mapping[str, Any]] = {}
        self._alive: Mapping[str, bool] = {}
        self._gauges: Mapping[str, float] = {}
        self._requests = Counter(
            "graft_requests",
            "Requests that ended, by finish reason.",
            ["reason"],
            registry=self._registry,
        )
        self._prompt_tokens = Counter(
            "graft_prompt_tokens", "Tokens of prompts.", registry=self._registry
        )
        self._histograms = {
            name: Histogram(
                f"graft_{name}_seconds", description, buckets=_BUCKETS_S, registry=self._registry
            )
            for name, description in _HISTOGRAMS
        }

    def count(self, output: Output) -> None:
        """Update the metrics of requests with the output of a request that has ended."""
        self._requests.labels(output.reason).inc()
        self._prompt_tokens.inc(output.prompt_tokens)
        values = {
            "queue": output.queue_s,
            "first_token": output.first_token_s,
            "token": _inter_token_latency(output),
            "request": output.total_s,
        }
        for name, value in values.items():
            if value is not None:
                self._histograms[name].observe(value)

    def page(self, counters: Sequence[Mapping[str, Any] | None], **gauges: float) -> bytes:
        """Return the metrics in Prometheus's text format.

        `counters` has the result of `Engine.counters` for each replica. For a replica that does not
        answer, the entry is None, and the last known counters are reported. `gauges` has the values
        of the gauges in `_SERVER_GAUGES`.
        """
        alive = {}
        for index, engine in enumerate(counters):
            replica = str(index)
            alive[replica] = engine is not None
            if engine is not None:
                self._engines[replica] = engine
        self._alive = alive
        self._gauges = gauges
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges of the server and the metrics of the engines.

        The registry calls this method whenever `page` is called.
        """
        for name, value in self._gauges.items():
            yield GaugeMetricFamily(f"graft_{name}", _SERVER_GAUGES[name], value)
        alive = {(replica,): is_alive for replica, is_alive in self._alive.items()}
        yield _family(GaugeMetricFamily, "graft_up", "Whether the replica answers.", (), alive)
        for kind, table in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, description, group, key in table:
                values = {}
                for replica, engine in self._engines.items():
                    values[(replica,)] = engine[group].get(key, 0)
                yield _family(kind, name, description, (), values)
        yield from self._round_counters()
        yield from self._draft_counters()
        yield from self._grammar_times()

    def _round_counters(self) -> Iterator[Metric]:
        for key, label, description in _ROUND_COUNTERS:
            values = {}
            for replica, engine in self._engines.items():
                for name, rounds in engine["engine"][key].items():
                    values[(replica, name)] = rounds
            yield _family(CounterMetricFamily, f"graft_{key}", description, (label,), values)

    def _draft_counters(self) -> Iterator[Metric]:
        for key, description in _DRAFT_COUNTERS:
            values = {}
            for replica, engine in self._engines.items():
                for position, value in enumerate(engine["engine"][key]):
                    values[(replica, str(position))] = value
            yield _family(
                CounterMetricFamily, f"graft_drafts_{key}", description, ("position",), values
            )

    def _grammar_times(self) -> Iterator[Metric]:
        values: dict[tuple[str, ...], float] = {}
        for replica, engine in self._engines.items():
            for step in ("open", "commit", "draft"):
                values[(replica, step)] = engine["grammar"][f"{step}_ns"] / 1e9
        description = "Time of grammar steps in seconds."
        yield _family(CounterMetricFamily, "graft_grammar_seconds", description, ("step",), values)
        exposed: dict[tuple[str, ...], float] = {}
        for replica, engine in self._engines.items():
            stats = engine["engine"]
            if stats["exposed_share"] is not None:
                exposed[(replica,)] = stats["exposed_share"] * stats["round_ns"] / 1e9
        if exposed:
            description = "Time in seconds during which the model lane waited for the grammar."
            yield _family(
                CounterMetricFamily, "graft_grammar_exposed_seconds", description, (), exposed
            )


def _inter_token_latency(output: Output) -> float | None:
    """Return the mean inter-token latency in seconds; None for fewer than two tokens."""
    intervals = len(output.tokens) - 1
    if output.first_token_s is None or output.total_s is None or intervals < 1:
        return None
    return (output.total_s - output.first_token_s) / intervals


def _family(
    kind: Any, name: str, description: str, labels: Sequence[str], values: Mapping[Any, float]
) -> Any:
    """Return a metric of class `kind` with the label ``replica`` and the additional `labels`.

    `values` maps tuples to the values of the metric. A tuple is the number of the replica, followed
    by the values of `labels`.
    """
    family = kind(name, description, labels=["replica", *labels])
    for key, value in values.items():
        family.add_metric(key, value)
    return family
