"""Draft trees, compared with the reference, and proposals that are trees."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import reference_round as ref
from reference_trees import children, grow, grow_given
from round_simulator import read_drafted
from test_verify import random_adjustment, random_slot

from graft.sampling.mode import TREE_CANDIDATES, DraftMode
from graft.sampling.tree import TreePlan, TreeSampler

V = 61
SLOTS = 12
BRANCH = 3
LEVELS = 4
DRAFTS = 7
RANKS = [(0,), (2,), (0, 0), (0, 1), (2, 1), (0, 1, 0), (0, 1, 0, 2)]


def tree_mode(
    masking: str = "none",
    drafts: int = DRAFTS,
    levels: int = LEVELS,
    branch: int = BRANCH,
    candidates: int | None = None,
    paths: tuple[tuple[int, ...], ...] = (),
) -> DraftMode:
    """Return the mode of a draft tree."""
    if candidates is None:
        candidates = TREE_CANDIDATES if masking == "probe" else 0
    return DraftMode(
        drafts=drafts,
        levels=levels,
        branch=branch,
        masking=masking,
        candidates=candidates,
        paths=paths,
    )


def noise_of(*key: object) -> np.random.Generator:
    """Return a generator that is seeded by the key."""
    return np.random.default_rng(list(hashlib.sha256(repr(key).encode()).digest()))


@functools.cache
def logits_of(slot: int, path: tuple[int, ...], size: int) -> np.ndarray:
    """Return a drafter's logits after a path; some tie, are -inf or NaN."""
    rng = noise_of("logits", slot, path)
    logits = rng.normal(0, 3, size).astype(np.float32)
    if rng.random() < 0.3:
        logits = np.round(logits)
    logits[rng.random(size) < 0.1] = -np.inf
    if rng.random() < 0.03:
        logits[4] = np.nan
    return logits


@functools.cache
def legal_tokens(slot: int, path: tuple[int, ...]) -> np.ndarray:
    """Return which of the tokens the grammar accepts after a path."""
    rng = noise_of("legal", slot, path)
    share = rng.choice([0.02, 0.2, 0.7, 1.0])
    return rng.random(V) < share


def is_legal(slot: int, path: tuple[int, ...], token: int) -> bool:
    """Return whether the grammar accepts a token after a path."""
    return bool(legal_tokens(slot, path)[token])


def fed_paths(state: np.ndarray, level: int) -> list[tuple[int, ...] | None]:
    """Return the paths of the nodes that a slot feeds to the drafter at a level."""
    if level == 1:
        return [()]
    rows = range((level - 2) * BRANCH + 1, (level - 1) * BRANCH + 1)
    found: list[tuple[int, ...] | None] = []
    for row in rows:
        path: tuple[int, ...] = ()
        while row and state["drafts"][row - 1] >= 0:
            path = (int(state["drafts"][row - 1]), *path)
            row = int(state["parent"][row - 1])
        found.append(path or None)
    return found


class TreeRound:
    """Trees of all slots of a round, with hash-based drafters and grammars."""

    def __init__(
        self,
        r,
        rng: np.random.Generator,
        ids: np.ndarray,
        probed: bool,
        ranks: list[tuple[int, ...]],
    ) -> None:
        self.r = r
        self.ids = ids
        self.probed = probed
        self.ranks = ranks
        self.number = int(rng.integers(1 << 30))
        self.free = [i % 4 == 0 for i in range(SLOTS)]  # without a grammar
        self.slots = [random_slot(rng, V, 5) for _ in range(SLOTS)]
        rows = []
        for s, has_no_grammar in zip(self.slots, self.free, strict=True):
            s.verify = ref.COUPLED
            s.limit += 3
            s.adjust = random_adjustment(rng, V)
            rows.append([ref.MaskRow(ref.FREE, s.epoch, s.n, detail=has_no_grammar)])
        before = [s.n for s in self.slots]
        self.order = rng.permutation(SLOTS)
        logits = rng.normal(0, 2, (SLOTS, 1, V)).astype(np.float32)
        r.play(self.slots, logits, rows, self.order)
        self.growing = []  # slots that generate drafts
        for i, s in enumerate(self.slots):
            if s.n > before[i] and ref.may_grow(s, 0):
                self.growing.append(i)

    def logits(self, level: int):
        """Return the logits of the nodes that are fed to the drafter, in its output layout."""
        state = self.r.state.to_host()
        rows = 1 if level == 1 else BRANCH
        logits = np.zeros((SLOTS, rows, len(self.ids)), np.float32)
        for i in range(SLOTS):
            for f, path in enumerate(fed_paths(state[i], level)):
                if path is not None:
                    logits[i, f] = logits_of(self.number + i, path, len(self.ids))
        return self.r.device.from_host(logits[self.order].reshape(-1, len(self.ids)), "float32")

    def answer(self, level: int) -> None:
        """Answer probes in place of the grammar worker.

        Slots without a grammar and slots that generate no drafts must not be probed.
        """
        exchange = self.r.exchange
        state = self.r.state.to_host()
        for i in range(SLOTS):
            record = exchange.candidates[i]
            is_probed = tuple(record[:2]) == (self.r.replay, level)
            assert is_probed == (i in self.growing and not self.free[i])
            if not is_probed:
                continue
            candidates = record[3:].reshape(BRANCH, TREE_CANDIDATES).tolist()
            for f, path in enumerate(fed_paths(state[i], level)):
                exchange.legal[i, f] = self._legal_bits(i, path, candidates[f])
            exchange.answer[i] = (self.r.replay, level, BRANCH)

    def _legal_bits(self, i: int, path: tuple[int, ...], candidates: list[int]) -> int:
        """Return the first `BRANCH` legal candidates as bits."""
        found = 0
        bits = 0
        for c, token in enumerate(candidates):
            if token < 0 or found == BRANCH:
                break
            if is_legal(self.number + i, path, token):
                found += 1
                bits |= 1 << c
        return bits

    def reference(self, i: int, limit: int, nodes: int) -> tuple[list[int], bool]:
        """Grow a slot's tree with the reference.

        Returns the number of nodes per level that are fed to the drafter. Also returns whether the
        order of the nodes is certain: different scores differ by more than rounding errors.
        """
        s = self.slots[i]
        number = self.number + i

        def children_of(path: tuple[int, ...], ranks: Any = None) -> list[tuple[float, int]]:
            legal = None
            if self.probed and not self.free[i]:
                legal = partial(is_legal, number, path)
            logits = logits_of(number, path, len(self.ids))
            return children(
                s,
                s.n + len(path) + 1,
                ref.adjusted_draft(s, path, logits, self.ids, V),
                self.ids,
                limit,
                legal,
                TREE_CANDIDATES if self.probed else BRANCH,
                BRANCH,
            )

        if self.ranks:
            s.tree, feeds, gap = grow_given(s, self.ranks, s.limit, children_of)
        else:
            levels = min(LEVELS, nodes)
            s.tree, feeds, gap = grow(s, BRANCH, levels, nodes, s.limit, children_of)
        s.kinds = (ref.POINT,) * len(s.drafts)
        s.q = (None,) * len(s.drafts)
        return feeds, gap > 1e-5


def tree_cases() -> list[Any]:
    """Return the combinations of block size, masking and shape; half of them require --full."""
    shapes = [("whole", False, []), ("pruned", True, []), ("fixed", True, RANKS)]
    settings = itertools.product((1, 64), (True, False), shapes)
    cases = []
    for block, probed, (shape, pruned, ranks) in settings:
        masking = "probed" if probed else "unmasked"
        parity = (block == 64) + probed + (shape == "pruned")
        marks = [] if parity % 2 else [pytest.mark.full]
        name = f"block{block}-{masking}-{shape}"
        cases.append(pytest.param(block, probed, pruned, ranks, id=name, marks=marks))
    return cases


@pytest.mark.parametrize("block, probed, pruned, ranks", tree_cases(), indirect=["block"])
@pytest.mark.full("block1-probed-whole")
def test_draft_tree_matches_reference(make_round, block, probed, pruned, ranks):
    """Candidates, nodes fed to the drafter, and drafts match the reference.

    The requests are greedy or verified by coupled sampling, and half of them have logit
    adjustments. The cases include ties, limits, stop ids, smaller trees and fixed shapes.
    """
    rng = np.random.default_rng(5)
    d2t = None
    ids = np.arange(V)
    if pruned:
        d2t = ids = np.sort(rng.choice(V, 40, replace=False)).astype(np.int32)
    limit = V - 2
    r = make_round(
        slots=SLOTS,
        mode=tree_mode(
            masking="probe" if probed else "none", paths=TreePlan.of(ranks).paths if ranks else ()
        ),
        vocab=V,
        token_limit=limit,
        d2t=d2t,
        block=block,
    )
    whole = TreeSampler(r.sampler.arrays)
    seen = Counter()
    sizes = [DRAFTS if ranks else 2, DRAFTS, DRAFTS]
    if block == 1:
        sizes.append(DRAFTS)
    for nodes in sizes:
        trees = TreeRound(r, rng, ids, probed, ranks)
        tree = whole if ranks else whole.limited_to(nodes)
        for level in range(1, min(LEVELS, nodes) + 1):
            logits = trees.logits(level)
            if probed:
                tree.candidates(r.lane, logits, r.row_slot, level)
                r.stream.synchronize()
                trees.answer(level)
            tree.draft(r.lane, logits, r.row_slot, level)
            r.stream.synchronize()
        for i in trees.growing:
            s = trees.slots[i]
            feeds, clear = trees.reference(i, limit, nodes)
            seen["clear"] += clear
            seen["all"] += 1
            if not clear:
                r.take(i, s)
                continue
            seen["drafts", len(s.drafts)] += 1
            seen["stops"] += not set(s.drafts).isdisjoint(s.stop_ids)
            seen["narrow"] += any(b < a for a, b in pairwise(feeds))
        r.compare(trees.slots)
        for i in trees.growing:
            s = trees.slots[i]
            assert read_drafted(r.exchange, i) == (r.replay, s.drafts, s.tree.parent[1:])
    assert seen["clear"] > 0.7 * seen["all"]
    assert seen["stops"] > 1
    assert seen["narrow"] > 1
    assert seen["drafts", DRAFTS] > 2
    if probed:
        num_smaller = sum(seen["drafts", n] for n in range(DRAFTS))
        assert num_smaller > 2


def test_draft_tree_prefers_earlier_of_equal_nodes(make_round, block):
    """With equal logits, nodes with a smaller index are fed to the drafter and drafted first."""
    r = make_round(slots=1, mode=tree_mode(), vocab=8, block=block)
    tree = TreeSampler(r.sampler.arrays)
    slot = ref.Slot(n=4, tree=ref.chain(1), limit=50)
    slot.filter = ref.Filter(0.0)
    r.play([slot], np.zeros((1, 1, 8), np.float32), [[ref.MaskRow(ref.FREE, 1, 4, detail=1)]])
    for level in range(1, LEVELS + 1):
        up = r.device.zeros((1 if level == 1 else BRANCH, 8), "float32")
        tree.draft(r.lane, up, r.row_slot, level)
    slot.tree = ref.Tree((slot.last, 0, 1, 2, 0, 1, 2, 0), (-1, 0, 0, 0, 1, 1, 1, 2))
    slot.kinds = (ref.POINT,) * DRAFTS
    slot.q = (None,) * DRAFTS
    r.compare([slot])


def test_draft_tree_without_answer_is_empty(make_round):
    """If the grammar has not answered for this replay and level, no candidate counts as legal."""
    mode = tree_mode(drafts=3, branch=2, levels=2, masking="probe")
    r = make_round(slots=1, mode=mode, vocab=V)
    tree = TreeSampler(r.sampler.arrays)
    slot = ref.Slot(n=4, tree=ref.chain(1), limit=50)
    slot.filter = ref.Filter(0.0)
    r.play([slot], np.zeros((1, 1, V), np.float32), [[ref.MaskRow(ref.FREE, 1, 4)]])
    r.exchange.legal[:] = 3
    for level, answer in ((1, (r.replay - 1, 1, 1)), (2, (r.replay, 1, 2))):
        r.exchange.answer[0] = answer
        up = r.device.zeros((level, V), "float32")
        tree.candidates(r.lane, up, r.row_slot, level)
        tree.draft(r.lane, up, r.row_slot, level)
        r.stream.synchronize()
    assert r.state.to_host()["draft_len"][0] == 0
    assert tuple(r.exchange.drafted[0, :2]) == (r.replay, 0)


def add_proposed(slot: ref.Slot, tokens: list[int], parents: list[int], vocab: int) -> None:
    """Apply a proposal to the reference: skip invalid ids and their descendants."""
    rows: dict[int, int] = {0: 0}
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
        if not 0 <= token < vocab or not 0 <= parent < i or parent not in rows:
            continue
        parent_row = rows[parent]
        if not ref.may_grow(slot, parent_row):
            continue
        row = slot.tree.child(parent_row, token)
        if row is None:
            row = len(slot.drafts) + 1
            ref.keep(slot, token, parent=parent_row)
        rows[i] = row


@pytest.mark.parametrize("kind", ["chain", "tree", "answer"])
def test_proposed_drafts_match_reference(make_round, kind):
    """The drafts from proposals with invalid entries match the reference.

    Proposals are chains, trees or answers to a lattice probe. Siblings with equal ids become one
    draft. An answer of another replay is ignored.
    """
    answered = kind == "answer"
    rng = np.random.default_rng(2)
    mode = DraftMode.chain(DRAFTS)
    if answered:
        mode = tree_mode(masking="lattice-probe", candidates=1)
    r = make_round(slots=SLOTS, mode=mode, vocab=V)
    seen: Counter = Counter()
    for _ in range(10):
        slots = [random_slot(rng, 6, 2) for _ in range(SLOTS)]
        before = [s.n for s in slots]
        rows = []
        for s in slots:
            s.limit = s.n + int(rng.integers(2, 30))
            s.verify = ref.COUPLED
            rows.append([ref.MaskRow(ref.FREE, s.epoch, s.n, detail=1)])
        logits = rng.normal(0, 2, (SLOTS, 1, V)).astype(np.float32)
        r.play(slots, logits, rows)
        tokens = rng.integers(-1, 6, (SLOTS, DRAFTS))
        tokens[rng.random(tokens.shape) < 0.05] = V
        parents = rng.integers(0, np.arange(1, DRAFTS + 1), (SLOTS, DRAFTS))
        parents += rng.choice([-1, 0, 0, 0, 0, 0, 1], parents.shape)
        if kind == "chain":
            # otherwise most random chains would end early
            tokens[rng.random(tokens.shape) < 0.7] = 3
            parents[:] = range(DRAFTS)
        outdated = [answered and i % 4 == 3 for i in range(SLOTS)]
        if answered:
            for i in range(SLOTS):
                words = np.array([tokens[i], parents[i]], np.int32)
                r.exchange.answer[i] = (r.replay - outdated[i], 0, DRAFTS)
                r.exchange.legal[i] = words.view(np.uint32).ravel()
        max_drafts = int(rng.integers(DRAFTS + 1))
        r.sampler.proposals.add_drafts(
            r.lane,
            None if answered else r.device.from_host(tokens.astype(np.int32), "int32"),
            r.row_slot,
            r.device.from_host(parents.astype(np.int32), "int32") if kind == "tree" else None,
            max_drafts=max_drafts,
        )
        r.stream.synchronize()
        for i, s in enumerate(slots):
            if s.n == before[i] or not s.active or outdated[i]:
                continue
            add_proposed(s, tokens[i].tolist(), parents[i].tolist(), V)
            num_valid = len(s.drafts)
            # The cache entry of draft j is at n + j. Positions beyond the limit have no pages.
            num_positions = max(s.limit - s.n - 1, 0)
            fits = min(num_positions, max_drafts)
            s.tree = s.tree.first(fits)
            s.kinds = s.kinds[:fits]
            s.q = s.q[:fits]
            seen[len(s.drafts)] += 1
            seen["cut"] += num_valid > fits
        r.compare(slots)
    assert {0, 1, 2, 3, 4, 5} <= set(seen)
    assert seen["cut"] > 3
