"""Tests of tokens that are sampled without masks and then checked by the guided decoder.

The expected states and mask rows come from new matchers that accept each path of the draft tree
from its root.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from guide_util import MATCHER_KINDS, SPECS, PythonMatcher, Rig, joined, oracle_row
from reference_round import (
    CHECKED,
    DEAD_END,
    ERROR,
    FREE,
    NOT_READY,
    READY,
    UNCHECKED,
    Tree,
    bits,
    chain,
)
from test_guide_trees import TEXT, VOCAB_SIZE, random_tree

from graft.cudagraph.errors import OptionError
from graft.grammar import GuidedDecoder, GuidedRequest
from graft.grammar.forced import ForcedTokens
from graft.sampling.mode import DraftMode

both = pytest.mark.parametrize("kind", MATCHER_KINDS)
NODES = 8
POSITION = 10
PROPOSED = DraftMode(drafts=NODES)


def optimistic(rig: Rig, spec: str = "regex", **options) -> GuidedRequest:
    """Return a request whose tokens are sampled without masks."""
    request = rig.request(spec, **options)
    return GuidedRequest(
        request.slot, request.epoch, request.matcher, request.position, optimistic=True
    )


def write_sampled(rig: Rig, replay: int, tokens: list[int], slot: int = 0) -> None:
    """Write the sampled token of each row, as the sampling kernels do."""
    sampled = rig.exchange.sampled[slot]
    sampled["replay"][: len(tokens)] = replay
    sampled["id"][: len(tokens)] = tokens


def random_samples(rng: np.random.Generator, start, text: list[int], tree: Tree) -> list[int]:
    """Return a token for each row of a tree: a draft, a legal token, or any token."""
    tokens = []
    for node in range(len(tree.token)):
        drafts = [tree.token[child] for child in tree.children(node)]
        row = oracle_row(start, [*text, *tree.path(node)])
        legal = [] if row is None else bits(row)
        kind = rng.random()
        if drafts and kind < 0.5:
            tokens.append(int(rng.choice(drafts)))
        elif len(legal) and kind < 0.7:
            tokens.append(int(rng.choice(legal)))
        else:
            tokens.append(int(rng.choice([*TEXT, -1, VOCAB_SIZE - 1])))
    return tokens


def expected_states(start, text: list[int], tree: Tree, tokens: list[int]) -> dict[int, int]:
    """Return the states of the rows that verification can reach; others remain unchecked."""
    states = {}
    reached = [0]
    while reached:
        node = reached.pop()
        row = oracle_row(start, [*text, *tree.path(node)])
        if row is None:
            continue
        token = tokens[node]
        if token in bits(row):
            states[node] = CHECKED
            child = tree.child(node, token)
            reached += [] if child is None else [child]
        else:
            states[node] = READY if row.any() else DEAD_END
            reached += tree.children(node)
    return states


def accepted_path(rng, start, text, tree: Tree, tokens: list[int], states) -> list[int]:
    """Return the tokens that verification commits; the tokens of filled rows are sampled anew."""
    node: int | None = 0
    path: list[int] = []
    while node is not None and states.get(node) in (CHECKED, READY):
        token = tokens[node]
        if states[node] == READY:
            legal = bits(oracle_row(start, [*text, *path]))
            drafts = [tree.token[child] for child in tree.children(node)]
            both_sets = [draft for draft in drafts if draft in legal]
            token = int(rng.choice(both_sets or legal))
        path.append(token)
        node = tree.child(node, token)
    return path


def check_round(rig: Rig, replay: int, start, text: list[int], tree: Tree, tokens: list[int]):
    """Run the check step of a replay, compare its results, and return the expected states."""
    depth = [len(tree.path(node)) for node in range(len(tree.token))]
    position = POSITION + len(text)
    assert rig.rows() == [(UNCHECKED, 1, position + d) for d in depth]
    write_sampled(rig, replay, tokens)
    before = rig.decoder.counters()
    rig.run(rig.decoder.check_work())
    states = expected_states(start, text, tree, tokens)
    found = [(states.get(node, UNCHECKED), 1, position + d) for node, d in enumerate(depth)]
    assert rig.rows() == found, (text, tree, tokens)
    assert all(rig.states()[n][3] == replay for n, state in states.items() if state == CHECKED)
    for node, state in states.items():
        if state == READY:
            row = oracle_row(start, [*text, *tree.path(node)])
            np.testing.assert_array_equal(rig.exchange.masks[0, node], row)
    after = rig.decoder.counters()
    added = {name: after[name] - before[name] for name in ("checks", "check_misses", "fills")}
    misses = sum(state != CHECKED for state in states.values())
    assert added == {"checks": len(states), "check_misses": misses, "fills": misses}
    return states


def guide_request(rig: Rig, spec: str, rng: np.random.Generator) -> list[int]:
    """Run up to seven rounds of a request, and return the states of the rows that were checked."""
    start = rig.backend.compile(SPECS[spec]).matcher
    request = optimistic(rig, spec)
    text: list[int] = []
    seen: list[int] = []
    tree = chain(0)
    rig.start(1, [request])
    for replay in range(1, 8):
        tokens = random_samples(rng, start, text, tree)
        states = check_round(rig, replay, start, text, tree, tokens)
        seen += states.values()
        committed = accepted_path(rng, start, text, tree, tokens, states)
        if not committed:
            break
        rig.verify(replay, *committed)
        text += committed
        if oracle_row(start, text) is None:  # the text is complete
            break
        assert rig.rows() == []
        tree = random_tree(rng, start, text, int(rng.integers(1, NODES + 1)))
        rig.drafted(replay, *tree.token[1:], parents=tree.parent[1:])
        rig.decoder.retire(replay)
        rig.start(replay + 1, [request])
    return seen


@both
@pytest.mark.parametrize("spec", ["regex", "schema", "dead end"])
def test_check_accepts_legal_tokens_and_fills_rows_of_illegal_ones(backend, kind, spec):
    """Only rows that verification can reach are checked, and only illegal tokens cost a fill."""
    rng = np.random.default_rng(4)
    seen: list[int] = []
    for _ in range(6):
        rig = Rig(backend, kind, mode=PROPOSED)
        seen += guide_request(rig, spec, rng)
        counters = rig.decoder.counters()
        assert counters["desyncs"] == counters["errors"] == 0
    assert seen.count(CHECKED) > 5 and seen.count(READY) > 5
    assert spec != "dead end" or DEAD_END in seen


@both
def test_check_ignores_tokens_of_earlier_replays(backend, kind):
    """A row stays unchecked if its token was sampled by an earlier replay or not at all."""
    rig = Rig(backend, kind, mode=PROPOSED)
    request = optimistic(rig)
    check = rig.decoder.check_work()
    rig.start(1, [request])
    rig.run(check)
    assert rig.rows() == [(UNCHECKED, 1, POSITION)]
    write_sampled(rig, 1, [ord("a")])
    rig.run(check)
    assert rig.states()[0] == [CHECKED, 1, POSITION, 1]
    rig.verify(1)  # the round commits nothing
    rig.decoder.retire(1)
    rig.start(2, [request])
    assert rig.rows() == [(UNCHECKED, 1, POSITION)]
    rig.run(check)
    assert rig.rows() == [(UNCHECKED, 1, POSITION)]
    write_sampled(rig, 2, [ord("b")])
    rig.run(check)
    assert rig.rows() == [(READY, 1, POSITION)]
    rig.expect_row([])


def test_check_leaves_other_requests_alone(backend):
    """Rows of requests that are not optimistic are filled, and those without grammar are free."""
    rig = Rig(backend, slots=3, mode=PROPOSED)
    requests = [
        optimistic(rig, slot=0, epoch=1),
        rig.request(slot=1, epoch=2),
        GuidedRequest(2, 3, None, POSITION, optimistic=True),
    ]
    rig.start(1, requests)
    for slot, state in enumerate((UNCHECKED, READY, FREE)):
        assert rig.states(slot)[0][0] == state
        write_sampled(rig, 1, [ord("x")], slot)
    rig.run(rig.decoder.check_work())
    for slot, state in enumerate((READY, READY, FREE)):
        assert rig.states(slot)[0][0] == state
    rig.verify(1, ord("a"), slot=(0, 1, 2))
    assert [rig.states(slot)[0][0] for slot in range(3)] == [NOT_READY, READY, FREE]
    assert rig.decoder.counters()["check_calls"] == 1


def test_check_keeps_rows_that_draft_steps_have_filled(backend):
    """A row that was filled for its forced token is not checked, because it is ready.

    Without forced tokens, no row is filled if no candidate for a draft is legal.
    """
    mode = DraftMode.chain(2, "probe", candidates=4)
    forced_tokens = ForcedTokens(backend.vocabulary, unique_only=True)
    for forced in (forced_tokens, None):
        rig = Rig(backend, mode=mode, forced=forced)
        request = optimistic(rig)
        rig.start(1, [request])
        write_sampled(rig, 1, [ord("a")])
        check = rig.decoder.check_work()
        rig.run(check)
        rig.verify(1, ord("a"))
        rig.exchange.candidates[0, :4] = (1, 1, 1, ord("x"))  # no candidate is legal
        rig.run(rig.drafts[0])
        assert tuple(rig.exchange.answer[0]) == (1, 1, -1)
        filled = [(READY, 1, POSITION + 1)] if forced else []
        assert rig.rows() == filled
        rig.drafted(1, ord("b"))
        rig.decoder.retire(1)
        rig.start(2, [request])
        assert rig.rows() == [*(filled or [(UNCHECKED, 1, 11)]), (UNCHECKED, 1, POSITION + 2)]
        write_sampled(rig, 2, [ord("b"), ord("c")])
        rig.run(check)
        assert rig.rows() == [*(filled or [(CHECKED, 1, 11)]), (CHECKED, 1, POSITION + 2)]
        rig.verify(2, *b"bc")
        counters = rig.decoder.counters()
        assert counters["desyncs"] == 0 and counters["fills"] == len(filled)


def test_late_check_ends_round_before_unchecked_row(backend):
    """A row that a late slot has not checked stays unchecked; the check is withdrawn later."""
    rig = Rig(backend, slots=2, mode=PROPOSED, held=True)
    requests = [optimistic(rig, slot=slot, epoch=slot + 1) for slot in range(2)]
    check = rig.decoder.check_work()
    rig.start(1, requests)
    for slot in range(2):
        write_sampled(rig, 1, [ord("a")], slot)
    rig.close_gate(1)
    rig.run(check)
    assert rig.rows(0) == [(UNCHECKED, 1, POSITION)]
    assert rig.rows(1) == [(CHECKED, 2, POSITION)]
    rig.committed(1, slot=0)
    rig.committed(1, ord("a"), slot=1)
    rig.run(rig.commit)
    rig.decoder.retire(1)
    rig.decoder.publish(2, requests)
    rig.open_gate()  # the order of replay 1 ends now
    rig.run(rig.open)
    assert rig.rows(0) == [(UNCHECKED, 1, POSITION)]
    for slot in range(2):
        write_sampled(rig, 2, [ord("c")], slot)
    rig.run(check)
    assert rig.states(0)[0] == [CHECKED, 1, POSITION, 2]
    assert rig.rows(1) == [(READY, 2, POSITION + 1)]
    assert rig.decoder.counters()["desyncs"] == 0


def test_late_check_is_stamped_with_its_replay(backend):
    """The result of a late check has the number of the earlier replay, so the device ignores it."""
    rig = Rig(backend, slots=2, mode=PROPOSED, held=True)
    requests = [optimistic(rig, slot=slot, epoch=slot + 1) for slot in range(2)]
    check = rig.decoder.check_work()
    rig.start(1, requests)
    write_sampled(rig, 1, [ord("a")])
    rig.close_gate(1)
    rig.run(check)
    rig.committed(1)
    rig.committed(1, slot=1)
    rig.run(rig.commit)
    rig.decoder.retire(1)
    rig.decoder.publish(2, requests)
    rig.run(rig.open)  # slot 0 is still busy
    rig.open_gate()
    write_sampled(rig, 2, [ord("b")])
    rig.run(check)
    assert rig.states(0)[0] == [CHECKED, 1, POSITION, 1]


def test_check_step_requires_draft_steps_for_forced_tokens(backend):
    """Forced tokens that the commit step drafts come from mask rows, which are not filled."""
    rig, _ = joined(backend, mode=DraftMode(drafts=2))
    forced = ForcedTokens(backend.vocabulary, unique_only=True)
    decoder = GuidedDecoder(rig.exchange, masked_drafts=False, forced=forced)
    with pytest.raises(OptionError, match="check step cannot be combined with forced tokens"):
        decoder.check_work()


def test_commit_keeps_tokens_that_the_check_has_accepted(backend):
    """The matcher accepts each committed token once, and rolls back the others."""
    rig = Rig(backend, mode=PROPOSED)
    request = optimistic(rig)
    check = rig.decoder.check_work()
    rig.start(1, [request])
    write_sampled(rig, 1, [ord("a")])
    rig.run(check)
    rig.verify(1, ord("a"))
    rig.drafted(1, *b"bcab")
    rig.decoder.retire(1)
    rig.start(2, [request])
    write_sampled(rig, 2, list(b"bccab"))
    rig.run(check)
    rig.verify(2, *b"bc")  # the device ends the round before the last token that was checked
    counters = rig.decoder.counters()
    assert counters["accepts"] == 1 + 3
    assert counters["rollbacks"] == 1
    rig.decoder.retire(2)
    rig.start(3, [request])
    write_sampled(rig, 3, [ord("x")])
    rig.run(check)
    rig.expect_row(list(b"abc"))


def test_rows_are_filled_ahead_if_tokens_are_often_illegal(backend):
    """Rows are filled in the open step once checks have failed and the time is hidden."""
    rig = Rig(backend, mode=PROPOSED, fill_hidden=True)
    request = optimistic(rig)
    check = rig.decoder.check_work()
    text: list[int] = []
    states = []
    for replay in range(1, 13):
        rig.start(replay, [request])
        states.append(rig.states()[0][0])
        if states[-1] == READY:
            rig.expect_row(text)
        time.sleep(0.01)  # the target forward pass
        write_sampled(rig, replay, [ord("x")])  # is illegal
        rig.run(check)
        assert rig.states()[0][0] == READY
        rig.verify(replay, ord("c"))
        text.append(ord("c"))
        rig.decoder.retire(replay)
    first = states.index(READY)
    assert set(states[:first]) == {UNCHECKED} and set(states[first:]) == {READY}
    counters = rig.decoder.counters()
    assert counters["fills_ahead"] == len(states) - first > 4
    assert counters["check_misses"] == first
    assert counters["fills"] == len(states) and counters["desyncs"] == 0


class FailingMatcher(PythonMatcher):
    """A matcher that fails when it is to accept a token after `fails_at` has been set."""

    fails_at: int | None = None

    def accept(self, token: int) -> bool:
        if token == self.fails_at:
            raise RuntimeError("the backend failed")
        return super().accept(token)


def test_check_reports_failure_after_probed_draft(backend):
    """If a check fails after a draft that was accepted by a probe, row 0 reports the error."""
    rig = Rig(backend, "python", mode=DraftMode.chain(2, "probe", 4))
    request = rig.request()
    matcher = FailingMatcher(request.matcher.inner)
    request = replace(request, matcher=matcher, optimistic=True)
    rig.start(1, [request])
    write_sampled(rig, 1, [ord("a")])
    rig.run(rig.decoder.check_work())
    rig.verify(1, ord("a"))
    rig.exchange.candidates[0][:4] = (1, 1, 1, ord("b"))
    rig.run(rig.drafts[0])
    rig.drafted(1, ord("b"))
    rig.decoder.retire(1)
    rig.start(2, [request])
    matcher.fails_at = ord("c")
    write_sampled(rig, 2, [ord("b"), ord("c")])
    rig.run(rig.decoder.check_work())
    assert rig.states()[0][0] == ERROR
    assert "the backend failed" in rig.decoder.error(0)
