"""Engines whose drafts are probed, whose grammar has threads, and whose requests may be late."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_util import demo_engine, mixed_requests

from graft.cudagraph.errors import OptionError
from graft.models.request import Output, Request
from graft.tools import cli, generate


def rounds(outputs: list[Output]) -> list[tuple[str, list[int], int, int]]:
    return [(o.reason, o.tokens, o.accepted, o.rounds) for o in outputs]


def noisy(requests: list[Request], **options: float) -> list[Request]:
    return [
        replace(r, temperature=0.8, seed=1000 + i, verify="coupled", **options)
        for i, r in enumerate(requests)
    ]


@pytest.mark.parametrize("mode", ["greedy", "coupled", "filtered"])
def test_probed_drafts_change_no_token(mode: str) -> None:
    """Outputs are those of filled drafts; without filters so are drafts, hence rounds and
    acceptance. Drafting probes, and no more rows are filled than verification reads."""
    requests = mixed_requests(3)
    if mode != "greedy":
        requests = noisy(requests, **({} if mode == "coupled" else {"top_p": 0.9, "top_k": 20}))
    outputs, grammar = {}, {}
    for legality in ("fill", "probe"):
        with demo_engine(max_batch_size=4, draft_legality=legality) as engine:
            outputs[legality] = engine.generate(requests)
            grammar[legality] = engine.counters()["grammar"]
            assert engine.stats.speculated_rounds > 0
    for fill, probe in zip(outputs["fill"], outputs["probe"], strict=True):
        assert (fill.reason, fill.tokens) == (probe.reason, probe.tokens)
    if mode != "filtered":
        assert rounds(outputs["probe"]) == rounds(outputs["fill"])
    fill, probe = grammar["fill"], grammar["probe"]
    assert fill["probes"] == 0 and fill["desyncs"] == probe["desyncs"] == 0
    assert probe["probes"] > 0 and probe["refused_drafts"] == 0
    assert probe["fills"] <= 4 * (probe["commits"] + len(requests))


def test_probed_rejection_sampling_takes_point_drafts() -> None:
    """Stochastic requests verified by rejection run to their end under probing, all legal."""
    requests = [
        replace(r, temperature=0.8, seed=50 + i) for i, r in enumerate(mixed_requests(4))
    ]
    with demo_engine(max_batch_size=4, draft_legality="probe") as engine:
        outputs = engine.generate(requests)
        grammar = engine.counters()["grammar"]
        assert not engine._parts.state.faults.to_host().any()
    assert {o.reason for o in outputs} <= {"stop", "length"}
    assert grammar["desyncs"] == grammar["errors"] == 0 and sum(o.accepted for o in outputs) > 0


@pytest.mark.parametrize("legality, verify, temperature",
                         [("fill", "rejection", 0.0), ("probe", "rejection", 0.0),
                          ("fill", "coupled", 0.8)])  # fmt: skip
def test_threads_and_budgets_change_no_token(
    legality: str, verify: str, temperature: float
) -> None:
    """With a budget that any order may exceed, greedy and coupled outputs stay the same."""
    requests = [replace(r, temperature=temperature, seed=i)
                for i, r in enumerate(mixed_requests(3))]  # fmt: skip
    outputs = []
    for budget, threads in ((None, 1), ("auto", 1), (1.0, 2)):
        with demo_engine(
            max_batch_size=4, draft_legality=legality, verify=verify, grammar_threads=threads,
            grammar_budget_us=budget,
        ) as engine:  # fmt: skip
            outputs.append([(o.reason, o.tokens) for o in engine.generate(requests)])
            grammar = engine.counters()["grammar"]
        assert grammar["desyncs"] == grammar["errors"] == 0
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"draft_legality": "guess"}, "draft_legality must be one of fill, probe, got 'guess'"),
        ({"draft_legality": "probe", "mask_drafts": False}, "'probe' needs mask_drafts"),
        ({"grammar_threads": 0}, "grammar_threads"),
        ({"grammar_budget_us": 0.0}, "grammar_budget_us"),
        ({"grammar_budget_us": "some"}, "grammar_budget_us must be auto, None or .*'some'"),
        ({"grammar_transport": "python"}, "must be one of auto, native, mailbox, spinkernel"),
    ],
)
def test_options_are_refused_by_name(options: dict, message: str) -> None:
    """Unknown and contradictory settings raise OptionError before anything is loaded."""
    with pytest.raises(OptionError, match=message):
        demo_engine(**options)


def test_the_command_line_chooses_how_drafts_are_made_legal() -> None:
    """--draft-legality reaches the engine and what it says of its options."""
    line = ["generate", "--prompt", "hi", "--draft-legality", "probe"]
    options = cli.parser().parse_args(line)
    with generate.open_engine(options, 1) as engine:
        assert engine.options.draft_legality == "probe" and engine._parts.decoder.probes
