"""What Prometheus is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from graft.models.request import Output

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
#: Counters of the engine: name, what it counts, and where it stands in `Engine.counters`.
_COUNTED = (
    ("graft_rounds", "replays of the round's graph", "engine", "rounds"),
    ("graft_request_rounds", "rounds, summed over their requests", "engine", "row_rounds"),
    ("graft_tokens", "tokens that rounds committed", "engine", "tokens"),
    ("graft_preemptions", "requests that lost their slot", "engine", "preemptions"),
    ("graft_grammar_fills", "mask rows filled", "grammar", "fills"),
    (
        "graft_grammar_late_rows",
        "rows that sat a round out for the grammar",
        "grammar",
        "late_rows",
    ),
    ("graft_grammar_compiled", "grammars compiled", "compile", "compiled"),
    ("graft_prefix_hit_tokens", "prompt tokens found in the cache", "prefixes", "hit_tokens"),
    ("graft_prefix_evictions", "pages evicted from the cache", "prefixes", "evictions"),
)
_HELD = (
    ("graft_prefix_pages", "pages that the prefix cache keeps", "prefixes", "pages"),
    ("graft_pages", "pages of running requests", "held", "pages"),
    ("graft_slots", "requests with a slot", "held", "slots"),
    ("graft_grammar_cache_bytes", "compiled grammars kept", "compile", "cache_bytes"),
)
_BY_POSITION = (("tested", "drafts tested, by position"), ("accepted", "drafts accepted"))


class Metrics:
    """Figures of requests as they end, and of the engines when somebody asks."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._engines: dict[str, Mapping[str, Any]] = {}
        self._up: Mapping[str, bool] = {}
        self._gauges: Mapping[str, float] = {}
        self._ended = Counter(
            "graft_requests", "requests ended, by the reason", ["reason"], registry=self._registry
        )
        self._prompt = Counter("graft_prompt_tokens", "tokens of prompts", registry=self._registry)
        self._times = {
            name: Histogram(
                f"graft_{name}_seconds", said, buckets=_SECONDS, registry=self._registry
            )
            for name, said in (
                ("queue", "until a request got a slot"),
                ("first_token", "until a request's first token was read"),
                ("token", "from one token to the next, a request's mean"),
                ("request", "until a request ended"),
            )
        }

    def count(self, output: Output) -> None:
        """A request has ended."""
        self._ended.labels(output.reason).inc()
        self._prompt.inc(output.prompt_tokens)
        first = output.first_token_s
        total = output.total_s
        more = len(output.tokens) - 1
        per_token = None if first is None or total is None or more < 1 else (total - first) / more
        for name, value in (
            ("queue", output.queue_s),
            ("first_token", first),
            ("token", per_token),
            ("request", total),
        ):
            if value is not None:
                self._times[name].observe(value)

    def page(self, engines: Sequence[Mapping[str, Any] | None], **gauges: float) -> bytes:
        """All of it, by each engine's counters (of before, where it does not answer)."""
        self._up = {str(i): counters is not None for i, counters in enumerate(engines)}
        self._engines |= {str(i): found for i, found in enumerate(engines) if found is not None}
        self._gauges = gauges
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        for name, value in self._gauges.items():
            yield GaugeMetricFamily(f"graft_{name}", name, value)
        yield _family(
            GaugeMetricFamily,
            "graft_up",
            "whether the engine answers",
            (),
            {(replica,): up for replica, up in self._up.items()},
        )
        for kind, table in ((CounterMetricFamily, _COUNTED), (GaugeMetricFamily, _HELD)):
            for name, said, part, key in table:
                yield _family(
                    kind,
                    name,
                    said,
                    (),
                    {(i,): engine[part].get(key, 0) for i, engine in self._engines.items()},
                )
        for key, said in _BY_POSITION:
            yield _family(
                CounterMetricFamily,
                f"graft_drafts_{key}",
                said,
                ("position",),
                {
                    (i, str(position)): value
                    for i, engine in self._engines.items()
                    for position, value in enumerate(engine["engine"][key])
                },
            )
        yield _family(
            CounterMetricFamily,
            "graft_grammar_seconds",
            "the grammar's steps",
            ("step",),
            {
                (i, step): engine["grammar"][f"{step}_ns"] / 1e9
                for i, engine in self._engines.items()
                for step in ("open", "commit", "draft")
            },
        )
        exposed = {
            (i,): engine["engine"]["exposed_share"] * engine["engine"]["round_ns"] / 1e9
            for i, engine in self._engines.items()
            if engine["engine"]["exposed_share"] is not None
        }
        if exposed:
            yield _family(
                CounterMetricFamily,
                "graft_grammar_exposed_seconds",
                "the model stood still for the grammar",
                (),
                exposed,
            )


def _family(
    kind: Any, name: str, said: str, labels: Sequence[str], values: Mapping[Any, float]
) -> Any:
    """Figures by replica, and by what else `labels` names."""
    family = kind(name, said, labels=["replica", *labels])
    for under, value in values.items():
        family.add_metric(under, value)
    return family
