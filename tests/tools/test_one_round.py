"""Tests of the example `one_round`: the round that is built by hand gives the engine's tokens."""

from __future__ import annotations

import pytest

from graft.cudagraph import Graph, HostWorkError
from graft.grammar import GrammarSpec
from graft.models import Engine, Request
from graft.tools.demo_model import demo_model
from graft.tools.examples import one_round

TRIP = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Paris", "Rome"]},
        "days": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    },
    "required": ["city", "days"],
}
OTHER_REQUESTS = [
    ("city: Rome; days: 3, 14", GrammarSpec.json_schema(TRIP)),
    ("Say yes or no.", GrammarSpec.choice(["yes", "no"])),
]


def tokens_of(rounds):
    return [token for _, tokens in rounds for token in tokens]


@pytest.mark.parametrize("requests", [one_round.REQUESTS, OTHER_REQUESTS], ids=["own", "other"])
def test_hand_built_round_gives_tokens_and_acceptance_of_engine(device, monkeypatch, requests):
    monkeypatch.setattr(one_round, "REQUESTS", requests)
    results = one_round.generate()
    with Engine(*demo_model(), max_batch_size=2, draft_length=one_round.K) as engine:
        outputs = engine.generate([Request(prompt=text, grammar=spec) for text, spec in requests])
    for rounds, output in zip(results, outputs, strict=True):
        assert output.reason == "stop"
        assert tokens_of(rounds) == list(output.tokens)
        assert len(rounds) == output.rounds
        assert sum(accepted for accepted, _ in rounds) == output.accepted


def test_hand_built_round_gives_same_tokens_with_wrong_drafts(device, monkeypatch):
    expected = [tokens_of(rounds) for rounds in one_round.generate()]
    choice = "d2t == nullptr ? column : d2t[column]"
    assert choice in one_round.KERNELS
    monkeypatch.setattr(one_round, "KERNELS", one_round.KERNELS.replace(choice, "7"))
    results = one_round.generate()
    assert [tokens_of(rounds) for rounds in results] == expected
    assert all(accepted == 0 for rounds in results for accepted, _ in rounds)


def test_lanes_of_hand_built_round_wait_only_where_the_file_says(device, monkeypatch):
    graphs = []

    def make_graph(*args):
        graphs.append(Graph(*args))
        return graphs[-1]

    monkeypatch.setattr(one_round, "Graph", make_graph)
    one_round.generate()
    [graph] = graphs
    earlier = {node.index: set() for node in graph.nodes}  # nodes that run before each node
    for before, after in sorted(graph.edges, key=lambda edge: edge[1]):
        earlier[after] |= {before, *earlier[before]}

    def node(name):
        [index] = [node.index for node in graph.nodes if node.name == name]
        return index

    def runs_before(first, second):
        return node(first) in earlier[node(second)]

    last = f"open: row {one_round.K}"
    assert earlier[node(last)] == set()
    assert runs_before("begin", "verify") and runs_before(last, "verify")
    assert runs_before("verify", "commit: row 0") and runs_before("verify", "fc")
    assert not runs_before("commit: row 0", "fc") and not runs_before("fc", "commit: row 0")
    assert runs_before("commit: row 0", "draft 1") and runs_before("fc", "draft 1")
    for j in range(1, one_round.K):
        step = f"draft {j}: row {j}"
        assert runs_before(f"draft {j}", step) and runs_before(step, f"draft {j + 1}")
        concurrent = [
            other
            for other in graph.nodes
            if other.lane == "model"
            and node(step) not in earlier[other.index]
            and other.index not in earlier[node(step)]
        ]
        assert len(concurrent) > 5  # the pass of the head


@pytest.mark.parametrize("skipped", [1, one_round.K])
def test_hand_built_round_uses_only_mask_rows_that_were_filled(device, monkeypatch, skipped):
    expected = [tokens_of(rounds) for rounds in one_round.generate()]
    follow = one_round.Grammar.follow

    def follow_others(self, j):
        if j != skipped:
            follow(self, j)

    monkeypatch.setattr(one_round.Grammar, "follow", follow_others)
    results = one_round.generate()
    assert [tokens_of(rounds) for rounds in results] == expected
    assert max(len(tokens) for rounds in results for _, tokens in rounds) == skipped


def test_failed_host_step_of_hand_built_round_is_raised(device, monkeypatch):
    def fail(self, j):
        raise ValueError(f"no row {j}")

    monkeypatch.setattr(one_round.Grammar, "follow", fail)
    with pytest.raises(HostWorkError, match=f"open: row {one_round.K}.*no row {one_round.K}"):
        one_round.generate()
