"""Tests of draft trees in the guided decoder.

The expected mask rows, counters and legal children come from new matchers that accept each path of
the tree from its root.
"""

from __future__ import annotations

import numpy as np
import pytest
from guide_util import MATCHER_KINDS, OTHER_STOP, STOP, Rig, compiled_for, joined, oracle_row
from reference_round import DEAD_END, NOT_READY, Tree, bits, chain
from reference_trees import legal_tree

from graft.grammar.decoder import GuidedRequest
from graft.sampling.mode import TREE_CANDIDATES, DraftMode

both = pytest.mark.parametrize("kind", MATCHER_KINDS)
NODES = 12
VOCAB_SIZE = 270
TEXT = [*b"abcab", STOP, OTHER_STOP, 261, 264]  # tokens that random drafts consist of


def random_tree(rng: np.random.Generator, start, last: list[int], nodes: int) -> Tree:
    """Return a random tree of mostly legal drafts, in which the children of a node are distinct."""
    tree = chain(last[-1])
    while len(tree.token) <= nodes:
        node = int(rng.integers(len(tree.token)))
        row = oracle_row(start, [*last, *tree.path(node)])
        legal = [] if row is None else [t for t in bits(row) if t < VOCAB_SIZE]
        choices = legal if legal and rng.random() < 0.8 else TEXT
        token = int(rng.choice(choices))
        if tree.child(node, token) is None:
            tree = tree.grow(node, token)
    return tree


#: The schema's matchers take the same paths through the decoder.
REGEX = pytest.param("regex", marks=pytest.mark.full)


def continuing_tokens(start, text: list[int]) -> list[int]:
    """Return the legal ids after a text, except stop ids and ids that lead to a dead end.

    Parameters
    ----------
    start
        Function that creates a matcher; None for a request without a grammar.
    text
        Tokens of the text.
    """
    if start is None:
        return [token for token in range(VOCAB_SIZE) if token not in (STOP, OTHER_STOP)]
    matcher = start()
    assert all(map(matcher.accept, text))
    tokens = []
    for token in matcher.legal().tolist():
        if token in (STOP, OTHER_STOP):
            continue
        assert matcher.accept(token)
        if matcher.legal().size > 0:
            tokens.append(token)
        matcher.rollback(1)
    return tokens


@both
@pytest.mark.parametrize("spec", [REGEX, "schema", "dead end"])
@pytest.mark.full("xgrammar-schema-python", "llguidance-schema-native")
def test_guide_fills_row_of_each_draft_tree_node(backend, kind, spec):
    """Each mask row is filled once, except rows after illegal drafts and after stop ids.

    After the rows are filled, verification may accept any path of the tree.
    """
    rng = np.random.default_rng(1)
    start = compiled_for("oracle", backend, spec).matcher
    fills = 0
    for seed in range(4):
        rig = Rig(backend, kind, k=NODES)
        text = []
        tree = chain(0)
        request = rig.request(spec)
        rig.start(1, [request])
        for replay in range(1, 8):
            # Accept a random path of the tree and one more token.
            path = list(tree.path(int(rng.integers(len(tree.token)))))
            while path and oracle_row(start, [*text, *path]) is None:
                path.pop()
            legal = continuing_tokens(start, [*text, *path])
            if not legal:
                break
            committed = [*path, int(rng.choice(legal))]
            rig.verify(replay, *committed)
            text += committed
            tree = random_tree(rng, start, text, int(rng.integers(1, NODES + 1)))
            rig.drafted(replay, *tree.token[1:], parents=tree.parent[1:])
            rig.decoder.retire(replay)
            before = rig.decoder.counters()["fills"]
            rig.start(replay + 1, [request])
            states = rig.states()
            filled = 0
            for node in range(len(tree.token)):
                path = tree.path(node)
                row = oracle_row(start, [*text, *path])
                if row is None:
                    assert states[node][0] == NOT_READY
                    continue
                filled += node > 0  # row 0 was filled by the commit step
                assert states[node][2] == 10 + len(text) + len(path)
                if row.any():
                    rig.expect_row([*text, *path], j=node, spec=spec)
                else:
                    assert states[node][0] == DEAD_END
            assert rig.decoder.counters()["fills"] - before == filled
            fills += filled
        counters = rig.decoder.counters()
        assert counters["desyncs"] == counters["errors"] == 0, seed
    assert fills > 20


@both
def test_guide_returns_legal_children_of_each_node(backend, kind):
    """A probe finds the first `branch` legal candidates of each node, and none for absent nodes.

    The probe does not change the mask rows that later steps fill.
    """
    branch = 2
    max_candidates = TREE_CANDIDATES
    mode = DraftMode(drafts=5, levels=3, branch=branch, masking="probe", candidates=max_candidates)
    rig, [request] = joined(backend, kind, mode=mode)
    compiled = compiled_for("oracle", backend, "regex")
    head = 3

    def probe(replay, level, *nodes):
        record = rig.exchange.candidates[0]
        record[:head] = (replay, level, len(nodes))
        record[head:] = -1
        for index, ids in enumerate(nodes):
            at = head + index * max_candidates
            record[at : at + len(ids)] = ids
        rig.run(rig.drafts[level - 1])
        assert tuple(rig.exchange.answer[0])[:2] == (replay, level)
        return rig.exchange.legal[0, : len(nodes)].tolist()

    def expected(path, ids):
        found = 0
        word = 0
        for i, token in enumerate(ids):
            legal = found < branch and oracle_after(path, token)
            found = found + legal
            word = word | legal << i
        return word

    def oracle_after(path, token):
        matcher = compiled.matcher()
        return all(map(matcher.accept, path)) and matcher.accept(token)

    text = [ord("c")]
    rig.verify(1, *text)
    first = [ord("x"), 261, ord("a"), ord("b"), ord("c"), STOP]
    assert probe(1, 1, first) == [expected(text, first)]
    assert expected(text, first) != 0
    legal = [t for i, t in enumerate(first) if expected(text, first) >> i & 1]
    fed = (legal[0], -1)
    rig.drafted(1, *fed, parents=(0, 0))
    assert probe(1, 2, first, []) == [expected([*text, legal[0]], first), 0]
    rig.drafted(1, *fed, legal[0], ord("Z"), parents=(0, 0, 1, 1))
    ids = [ord("c"), ord("a")]
    assert probe(1, 3, ids, ids) == [expected([*text, legal[0], legal[0]], ids), 0]
    rig.drafted(1, *legal, parents=(0,) * len(legal))
    rig.decoder.retire(1)
    rig.start(2, [request])
    rig.expect_row(text)
    for j, token in enumerate(legal, 1):
        if token != STOP:
            rig.expect_row([*text, token], j=j)
    counters = rig.decoder.counters()
    assert counters["desyncs"] == counters["errors"] == 0 and counters["probes"] > 6


def offer(
    rng: np.random.Generator, max_candidates: int, choices: list[int]
) -> list[tuple[int, float]]:
    """Return distinct candidates of a tree level with their probabilities.

    Some probabilities are equal or zero.
    """
    distinct = list(dict.fromkeys(choices))
    order = rng.permutation(distinct)
    count = int(rng.integers(max_candidates + 1))
    ids = order[:count].tolist()
    weights = rng.dirichlet([0.6] * (len(ids) + 1))
    descending = np.sort(weights)[::-1]
    shares = np.round(descending, 2).astype(np.float32)
    return list(zip(ids, shares[: len(ids)].tolist(), strict=True))


@both
@pytest.mark.parametrize("branch", [1, 3])
@pytest.mark.parametrize("spec", [REGEX, "schema", "dead end", None])
def test_guide_lattice_probe_matches_reference(backend, kind, spec, branch):
    """A lattice probe finds the same drafts as a reference that uses new matchers.

    The probe does not change the mask rows that later steps fill. For a request without a grammar,
    every id is legal.
    """
    rng = np.random.default_rng(8)
    levels = 5
    max_candidates = 6
    k = 7
    mode = DraftMode(
        drafts=k, levels=levels, branch=branch, masking="lattice-probe", candidates=max_candidates
    )
    rig = Rig(backend, kind, mode=mode)
    compiled = spec and compiled_for("oracle", backend, spec)
    request = rig.request(spec) if spec else GuidedRequest(0, 1, None, 10)
    text = []
    sizes = set()
    rig.start(1, [request])

    def probe(replay, max_drafts, offers):
        record = rig.exchange.candidates[0]
        share_offset = rig.exchange.layout["levels"] * max_candidates
        record[:3] = (replay, max_drafts, len(offers))
        record[3:] = -1
        for level, offered in enumerate(offers):
            at = 3 + level * max_candidates
            record[at : at + len(offered)] = [token for token, _ in offered]
            shares = np.array([share for _, share in offered], np.float32)
            record[at + share_offset : at + share_offset + len(offered)] = shares.view(np.int32)
        rig.run(rig.drafts[0])

    def matcher_after(path):
        matcher = compiled.matcher()
        return matcher if all(map(matcher.accept, [*text, *path])) else None

    def legal(path, token):
        if not 0 <= token < rig.decoder.vocab_size:
            return False
        return not spec or bool(matcher_after((*path, token)))

    def ended(path):
        return bool(spec) and matcher_after(path).is_terminated()

    for replay in range(1, 20):
        candidates = continuing_tokens(compiled.matcher if spec else None, text)
        if not candidates:
            break
        text.append(int(rng.choice(candidates)))
        rig.verify(replay, text[-1])
        choices = [*TEXT, *candidates[:4], ord("0"), ord('"'), VOCAB_SIZE]
        level_count = int(rng.integers(1, levels + 1))
        offers = [offer(rng, max_candidates, choices) for _ in range(level_count)]
        max_drafts = int(rng.integers(k // 2, k + 1))
        probe(replay, max_drafts, offers)
        tests = 4 * max_drafts + max_candidates
        tree = legal_tree(text[-1], offers, branch, max_drafts, tests, legal, ended)
        count = len(tree.token) - 1
        sizes.add(count)
        assert tuple(rig.exchange.answer[0]) == (replay, 0, count), offers
        answer_words = rig.exchange.legal[0].view(np.int32)
        assert tuple(answer_words[:count]) == tree.token[1:]
        assert tuple(answer_words[k : k + count]) == tree.parent[1:]
        rig.drafted(replay, *tree.token[1:], parents=tree.parent[1:])
        rig.decoder.retire(replay)
        rig.start(replay + 1, [request])
        for node in range(len(tree.token) if spec else 0):
            path = tree.path(node)
            row = oracle_row(compiled.matcher, [*text, *path])
            if row is not None and row.any():
                rig.expect_row([*text, *path], j=node, spec=spec)
    counters = rig.decoder.counters()
    assert counters["desyncs"] == counters["errors"] == 0 and counters["draft_calls"] == replay
    assert len(sizes) > 2 or spec == "dead end", sizes


@pytest.mark.parametrize("parents", [(0, 2), (0, -1), (1, 0)])
def test_guide_fails_request_with_invalid_draft_parent(backend, parents):
    """If the parent of a draft is invalid, only the request of this draft fails.

    No kernel writes such a draft, so the test writes the parents itself.
    """
    rig, [request] = joined(backend, k=2)
    rig.verify(1, ord("c"))
    rig.drafted(1, ord("c"), ord("c"), parents=parents)
    rig.decoder.retire(1)
    rig.start(2, [request])
    assert rig.decoder.counters()["errors"] == 1
