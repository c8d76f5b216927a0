"""The exact distribution of whole requests, by enumeration of all outcomes of the reference.

A round of the reference runs once for each combination of outcomes of its random decisions. Rounds
are independent, as `test_distribution` tests, so the probabilities of consecutive rounds are
multiplied. No random numbers are used.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import reference_round as ref

V = 3
DRAFTS = 3
LENGTH = 4
PLAIN = ref.Filter(1.0)
GREEDY = ref.Filter(0.0)


class OutcomeEnumerator:
    """Replacement of `reference_round.coin` and `draw` that enumerates all outcomes.

    Each outcome has its probability, so no random numbers are used.
    """

    def __init__(self) -> None:
        self.path: list[int] = []

    def choose(self, chances: list[float]) -> int:
        """Return the outcome of the run's next decision, given the outcomes' probabilities."""
        possible = [i for i, chance in enumerate(chances) if chance > 0]
        if self.depth == len(self.path):
            self.path.append(0)
            self.last.append(0)
        self.last[self.depth] = len(possible) - 1
        outcome = possible[self.path[self.depth]]
        self.depth += 1
        self.probability *= chances[outcome]
        return outcome

    def every(self, run: Callable[[], object]) -> Iterator[tuple[object, float]]:
        """Yield the result of `run` and its probability for each sequence of outcomes."""
        self.path = []  # index of the current outcome of each decision
        self.last = []  # index of the last outcome of each decision
        while True:
            self.depth = 0
            self.probability = 1.0
            result = run()
            yield result, self.probability
            while self.path and self.path[-1] == self.last[-1]:
                self.path.pop()
                self.last.pop()
            if not self.path:
                return
            self.path[-1] += 1

    def coin(self, *name: object) -> OutcomeEnumerator:
        return self

    def __lt__(self, chance: float) -> bool:
        return self.choose([1.0 - chance, chance]) == 1

    def draw(self, weights: np.ndarray, *name: object, **options: object) -> int:
        total = float(np.sum(weights))
        if total <= 0:
            return -1
        return self.choose(list(np.asarray(weights) / total))


@dataclass
class World:
    """A target, a drafter and a grammar that depend on the last token only.

    Attributes
    ----------
    target, drafter
        float32 [V, V], logits after each token.
    legal
        bool [V, V], whether the grammar allows a token after another one.
    kinds
        Kind of each draft: d for dense (sampled from q), p for a point mass.
    masked
        Whether drafts are generated under mask rows.
    late
        Whether rows after some tokens are not ready during verification.
    """

    target: np.ndarray
    drafter: np.ndarray
    legal: np.ndarray
    kinds: str = "ddd"
    masked: bool = True
    late: bool = False

    @classmethod
    def random(cls, seed: int, **fields: object) -> World:
        rng = np.random.default_rng(seed)
        legal = rng.random((V, V)) < 0.75
        legal[np.arange(V), (np.arange(V) + seed) % V] = True
        tables = (np.log(rng.dirichlet([0.5] * V, V)).astype(np.float32) for _ in range(2))
        return cls(*tables, legal, **fields)

    def row(self, slot: ref.Slot, j: int, token: int, verifying: bool = True) -> ref.MaskRow:
        late = verifying and self.late and j > 0 and (token + slot.n) % 2 == 0
        state = ref.NOT_READY if late else ref.READY
        return ref.MaskRow(state, slot.epoch, slot.n + j, self.legal[token])

    def round(self, slot: ref.Slot) -> tuple[tuple[int, ...], int]:
        """Draft and verify; return the tokens and the number of accepted drafts."""
        for j in range(1, DRAFTS + 1):
            last = slot.tree.token[-1]
            mask = None
            if self.masked:
                mask = self.row(slot, j - 1, last, verifying=False)
            answer = -1
            if self.kinds[j - 1] == "p":
                answer = (2 * last + j) % V
            ref.draft(slot, j, self.drafter[last], mask, V, None, V, answer=answer)
        padding = [0] * DRAFTS
        tokens = [*slot.tree.token, *padding][: DRAFTS + 1]
        rows = [self.row(slot, j, token) for j, token in enumerate(tokens)]
        outcome = ref.verify(slot, self.target[tokens], rows, V)
        return outcome.tokens, outcome.accepted


START = ref.Slot(n=7, tree=ref.chain(1), limit=8 + LENGTH)


def distribution_of_rounds(
    chance: OutcomeEnumerator, world: World, start: ref.Slot
) -> tuple[dict, float]:
    """Return the distribution of a request's tokens, and the mean acceptance of its first round."""

    @cache
    def rounds(n: int, last: int) -> list:
        """Return the outcomes of a round that begins with token `last` at position `n`."""

        def run() -> tuple[tuple[int, ...], int, bool]:
            slot = replace(start, n=n, tree=ref.chain(last))
            tokens, accepted = world.round(slot)
            return tokens, accepted, slot.active

        found: dict = defaultdict(float)
        for result, probability in chance.every(run):
            found[result] += probability
        return list(found.items())

    def request(n: int, last: int) -> dict:
        """Return the distribution of all tokens from position `n` on."""
        total: dict = defaultdict(float)
        for (tokens, _, active), probability in rounds(n, last):
            rest = {(): 1.0}
            if active:
                rest = request(n + len(tokens), tokens[-1])
            for continuation, p in rest.items():
                total[tokens + continuation] += probability * p
        return total

    mean = 0.0
    for (_, accepted, _), probability in rounds(start.n, start.last):
        mean += accepted * probability
    return request(start.n, start.last), mean


def target_distribution(world: World, start: ref.Slot) -> dict:
    """Return the distribution of the tokens without drafts."""
    total: dict = defaultdict(float)
    for tokens in itertools.product(range(V), repeat=LENGTH):
        probability = 1.0
        last = start.last
        kept = []
        for token in tokens:
            p = ref.distribution(world.target[last], world.legal[last], start.filter)
            probability = probability * p[token]
            last = token
            kept.append(token)
            if token in start.stop_ids:
                # the loop visits this prefix with each continuation
                probability /= V ** (LENGTH - len(kept))
                break
        if probability > 0:
            total[tuple(kept)] += probability
    return total


WORLDS = {
    "masked": {},
    "unmasked": {"masked": False},
    "late": {"late": True},
    "mixed": {"kinds": "pdd"},
    "mixed, unmasked": {"kinds": "dpd", "masked": False},
    "mixed, late": {"kinds": "ddp", "masked": False, "late": True},
    "points": {"kinds": "ppp"},
}


@pytest.mark.parametrize("stop_ids", [(), (2,)], ids=["endless", "stop"])
@pytest.mark.parametrize("how", WORLDS)
@pytest.mark.full("[unmasked-endless", "late-endless", "mixed-endless", "mixed, unmasked-endless")
def test_verification_preserves_target_distribution(monkeypatch, how, stop_ids):
    """The distribution of whole requests equals the target's distribution to 1e-12.

    On average, block verification accepts at least as many drafts as per-token tests. If a sampled
    draft follows another draft, block verification accepts more.
    """
    chance = OutcomeEnumerator()
    monkeypatch.setattr(ref, "coin", chance.coin)
    monkeypatch.setattr(ref, "draw", chance.draw)
    gain = 0.0
    for seed in range(3):
        world = World.random(seed, **WORLDS[how])
        means = []
        for verify in (ref.REJECTION, ref.PER_TOKEN):
            start = replace(START, verify=verify, stop_ids=stop_ids)
            found, mean = distribution_of_rounds(chance, world, start)
            wanted = target_distribution(world, start)
            assert found.keys() == wanted.keys()
            assert max(abs(found[t] - wanted[t]) for t in wanted) < 1e-12
            means.append(mean)
        assert means[0] > means[1] - 1e-12
        gain += means[0] - means[1]
    assert (gain > 1e-3) == (how != "points")


@dataclass
class TreeWorld(World):
    """World whose drafts are a tree of a given shape, as point masses.

    `shape` has the ranks of the nodes on each path; rank 0 is the most likely child.
    """

    shape: tuple[tuple[int, ...], ...] = ()

    def round(self, slot: ref.Slot) -> tuple[tuple[int, ...], int]:
        row_of: dict[tuple[int, ...], int] = {(): 0}
        for path in sorted(self.shape, key=len):
            node = row_of.get(path[:-1])
            if node is None or not ref.may_grow(slot, node):
                continue
            last = slot.tree.token[node]
            legal = self.legal[last] if self.masked else np.ones(V, bool)
            ranked = [token for token in ref.ranking(self.drafter[last]) if legal[token]]
            if path[-1] < len(ranked):
                row_of[path] = len(slot.tree.token)
                ref.keep(slot, int(ranked[path[-1]]), parent=node)
        tree = slot.tree
        rows = [self.row(slot, len(tree.path(j)), token) for j, token in enumerate(tree.token)]
        outcome = ref.verify(slot, self.target[list(tree.token)], rows, V)
        return outcome.tokens, outcome.accepted


SHAPES = {
    "star": ((0,), (1,), (2,)),
    "fork": ((0,), (0, 0), (0, 1)),
    "first": ((0,), (1,), (0, 0)),
    "second": ((0,), (1,), (1, 0)),
    "chain": ((0,), (0, 0), (0, 0, 0)),
}


@pytest.mark.parametrize("stop_ids", [(), (2,)], ids=["endless", "stop"])
@pytest.mark.parametrize("how", ["masked", "unmasked", "late"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tree_verification_preserves_target_distribution(monkeypatch, shape, how, stop_ids):
    """For every tree shape, the distribution of whole requests equals the target's to 1e-12."""
    chance = OutcomeEnumerator()
    monkeypatch.setattr(ref, "coin", chance.coin)
    monkeypatch.setattr(ref, "draw", chance.draw)
    for seed, verify in enumerate((ref.REJECTION, ref.COUPLED)):
        start = replace(START, verify=verify, stop_ids=stop_ids)
        world = TreeWorld.random(seed, **WORLDS[how], shape=SHAPES[shape])
        found, mean = distribution_of_rounds(chance, world, start)
        wanted = target_distribution(world, start)
        assert found.keys() == wanted.keys()
        assert max(abs(found[t] - wanted[t]) for t in wanted) < 1e-12
        assert mean > 0
