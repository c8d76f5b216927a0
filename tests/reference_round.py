"""Reference implementation of a round of guided speculative decoding, used by all tests of rounds.

A slot's drafts are a tree. Node 0 is the last committed token, at position `n`; the others are
drafts, with ``parent[j] < j``; a chain has ``parent[j] = j - 1``. A node of depth e is at position
n + e; its mask row and its logits decide position n + e + 1. A round

1. verifies (`walk`): from node 0 on, each node's row decides a token. If a child has that token,
   the walk continues there, otherwise it stops. A sampled draft is always tested: the walk may end
   after an accepted token (row not ready, stop id, limit) without a bonus token, but never instead
   of a test;
2. commits (`commit`): the tokens, the new node 0, the end of the request;
3. drafts (`draft`) if the prefix allows it (`may_grow`, the state of the row), whatever token would
   be sampled.

The reference uses float64, sorts distributions, samples by argmax(log p + Gumbel), and processes
one request at a time, independently of how the kernels compute.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graft.sampling.params import Relaxed, SamplingParams

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
# Purposes of random numbers.
NOISE = 0
DRAFT = 1
COIN = 2
RESIDUAL = 3
NOT_READY, FREE, READY, DEAD_END, ERROR = range(5)  # states of a mask row
RUNNING, STOP, LENGTH, DEAD, FAULT = range(5)  # reason for which a request ended
REJECTION, COUPLED, PER_TOKEN, RELAXED = range(4)  # verification modes
#: Distribution that a draft was sampled from: a table q, or a point mass.
DENSE = 0
POINT = 1


def philox4x32_10(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return Philox4x32-10 of a counter uint32 [..., 4] and a key uint32 [..., 2]."""
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k = [key[..., i].astype(np.uint64) for i in range(2)]
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    for _ in range(10):
        a = np.uint64(0xD2511F53) * c[0]
        b = np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> half) ^ c[1] ^ k[0], b & low, (a >> half) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(c, axis=-1).astype(np.uint32)


def words(
    seed: int, position: int, purpose: int, ids: np.ndarray, sample: int = 0, round_start: int = 0
) -> np.ndarray:
    """Return the random word of each id for a seed, position, purpose and round."""
    ids = np.asarray(ids)
    parts = np.broadcast_arrays(position, purpose | sample << 8, ids // 4, round_start)
    counter = np.stack(parts, axis=-1).astype(np.uint32)
    key = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint32)
    drawn = philox4x32_10(counter, np.broadcast_to(key, (*ids.shape, 2)))
    return np.take_along_axis(drawn, (ids % 4)[..., None], axis=-1)[..., 0]


def uniform(word: np.ndarray) -> FloatArray:
    """Return a uniform number in [0, 1) with 24 bits."""
    return (np.asarray(word, np.uint32) >> np.uint32(8)).astype(np.float64) * 2.0**-24


def gumbel(word: np.ndarray) -> FloatArray:
    """Return the Gumbel variate of a random word."""
    v = np.minimum((np.asarray(word, np.float64) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -np.log(-np.log1p(-v))


def coin(seed: int, position: int, sample: int, round_start: int) -> float:
    """Return the uniform number of the acceptance test of a position."""
    return float(uniform(words(seed, position, COIN, np.array([0]), sample, round_start))[0])


def draw(
    weights: FloatArray,
    seed: int,
    position: int,
    purpose: int,
    ids: np.ndarray | None = None,
    sample: int = 0,
    round_start: int = 0,
) -> int:
    """Return argmax(log weight + Gumbel), ties to the smaller column; -1 if all weights are 0."""
    weights = np.asarray(weights, np.float64)
    if not (weights > 0).any():
        return -1
    ids = np.arange(weights.size) if ids is None else ids
    noise = gumbel(words(seed, position, purpose, ids, sample, round_start))
    with np.errstate(divide="ignore"):
        scores = np.where(weights > 0, np.log(np.maximum(weights, 0)) + noise, -np.inf)
    return int(np.argmax(scores))


@dataclass(frozen=True)
class Filter:
    """Temperature and filters of a request."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy."""
        return bool(np.float32(self.temperature) < np.float32(1e-5))


def ranking(logits: np.ndarray) -> np.ndarray:
    """Return the columns from best to worst; equal logits by smaller id."""
    return np.argsort(-logits.astype(np.float64), kind="stable")


def distribution(logits: np.ndarray, legal: np.ndarray, f: Filter) -> FloatArray:
    """Return the filtered distribution; ties go to the smaller id."""
    legal = legal & (logits > -np.inf)
    x = np.where(legal, logits.astype(np.float64), -np.inf) / np.float64(np.float32(f.temperature))
    p = np.exp(x - x.max())
    order = ranking(np.where(legal, logits, -np.inf))
    if f.top_k > 0:
        p[order[f.top_k :]] = 0.0
    if np.float32(f.top_p) < 1.0:
        reached = np.cumsum(p[order]) >= np.float64(np.float32(f.top_p)) * p.sum() * (1 - 1e-12)
        p[order[int(np.argmax(reached)) + 1 :]] = 0.0
    if f.min_p > 0.0:
        p[p < np.float64(np.float32(f.min_p)) * p.max()] = 0.0
    return p / p.sum()


def pack_bits(legal: np.ndarray) -> np.ndarray:
    """Return mask words (int32 [..., ceil(V/32)]): id i is bit i % 32 of word i // 32."""
    size = legal.shape[-1]
    padded = np.zeros((*legal.shape[:-1], -(-size // 32) * 32), np.uint8)
    padded[..., :size] = legal
    return np.packbits(padded, axis=-1, bitorder="little").view(np.int32)


def bits(row: np.ndarray) -> np.ndarray:
    """Return the ids whose bit is set in a mask row."""
    words = np.ascontiguousarray(row)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


@dataclass(frozen=True)
class Tree:
    """Tokens and parents of nodes, parents before children; siblings have different tokens."""

    token: tuple[int, ...]
    parent: tuple[int, ...]

    def grow(self, node: int, token: int) -> Tree:
        """The tree with one more node, the last, under ``node``."""
        return Tree((*self.token, token), (*self.parent, node))

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` with this token; None if there is none."""
        found = [j for j, p in enumerate(self.parent) if p == node and self.token[j] == token]
        return found[0] if found else None

    def path(self, node: int) -> tuple[int, ...]:
        """Return the tokens on the path to a node, without node 0."""
        return (*self.path(self.parent[node]), self.token[node]) if node else ()

    def route(self, node: int) -> int:
        """Return the drafts on the path to a node as bits: bit j - 1 is draft j."""
        return self.route(self.parent[node]) | 1 << node - 1 if node else 0

    def first(self, drafts: int) -> Tree:
        """Return node 0 and the first drafts."""
        return Tree(self.token[: drafts + 1], self.parent[: drafts + 1])


def chain(last: int, *drafts: int) -> Tree:
    """Return a tree without branches."""
    return Tree((last, *drafts), tuple(range(-1, len(drafts))))


@dataclass(frozen=True)
class Adjustment:
    """Logit adjustments of a request, and its tokens when it joined its slot."""

    params: SamplingParams
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


@dataclass
class Slot:
    """A request between two rounds."""

    n: int  # position of the last committed token
    tree: Tree
    limit: int  # tokens are produced at positions below it
    seed: int = 0
    filter: Filter = field(default_factory=Filter)
    verify: int = REJECTION
    epoch: int = 1
    sample: int = 0
    active: bool = True
    stop_ids: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()  # of the drafts
    q: tuple[Any, ...] = field(default=(), repr=False)  # of the drafts, over target ids
    adjust: Adjustment | None = None
    relaxed: Relaxed = field(default_factory=Relaxed)

    @property
    def last(self) -> int:
        """The last committed token."""
        return self.tree.token[0]

    @property
    def drafts(self) -> tuple[int, ...]:
        """Tokens of the other nodes."""
        return self.tree.token[1:]


@dataclass(frozen=True)
class MaskRow:
    """A mask row and its stamp.

    Attributes
    ----------
    state, epoch, position, detail
        As in ``struct RowStamp`` of native/records/exchange.h. In a free row, `detail` is 1 if the
        request has no grammar. In a ready row, it is 1 + the forced token, or 0 without one.
    legal
        bool [V], whether each token id is legal.
    """

    state: int
    epoch: int
    position: int
    legal: Any = None
    detail: int = 0

    def counts_as(self, slot: Slot, position: int) -> int:
        """Return the state of the row for `slot` at a node's position.

        A row with another epoch or position is not ready. Free rows of a request without a grammar
        are free at every position.
        """
        anywhere = self.state == FREE and self.detail != 0
        mine = self.epoch == slot.epoch and (anywhere or self.position == position)
        return self.state if mine else NOT_READY

    def forced(self, slot: Slot, position: int) -> int:
        """Return the token that the grammar forces; -1 if there is none."""
        return self.detail - 1 if self.counts_as(slot, position) == READY else -1

    def allows(self, size: int, token_limit: int) -> BoolArray:
        """Return the legality of each id for a free or ready row."""
        ids = np.arange(size)
        return (ids < token_limit) & (True if self.state == FREE else self.legal[:size])


def row_at(exchange: Any, slot: int, j: int) -> MaskRow:
    """Return mask row j of a slot in exchange memory, without its mask."""
    state, epoch, position, detail = exchange.stamps[slot, j].tolist()
    return MaskRow(state, epoch, position, detail=detail)


@dataclass(frozen=True)
class Outcome:
    """Result of verification."""

    tokens: tuple[int, ...] = ()
    accepted: int = 0  # accepted drafts
    reason: int = RUNNING
    tested: int = 0  # number of verified drafts


def walk(
    slot: Slot,
    row: Callable[[int, int], tuple[int, Any]],
    decide: Callable[[int, int, Any], tuple[int, int | None]],
    tree: Tree | None = None,
) -> Outcome:
    """Walk the slot's tree.

    `row(node, position)` returns the state of the node's row and what it allows.
    `decide(node, position, allowed)` returns the token after the position, and the child with that
    token if it is accepted.
    """
    tree = slot.tree if tree is None else tree
    tokens: list[int] = []
    node = 0
    accepted = 0
    reason = RUNNING
    while slot.active:
        position = slot.n + len(tokens) + 1
        if position >= slot.limit:
            reason = LENGTH
            break
        state, allowed = row(node, position - 1)
        if state not in (FREE, READY):
            if not tokens:  # else the next round begins with this row
                reason = {DEAD_END: DEAD, ERROR: FAULT}.get(state, RUNNING)
            break
        token, child = decide(node, position, allowed)
        if token < 0:
            break
        tokens.append(token)
        accepted += child is not None
        if token in slot.stop_ids:
            reason = STOP
        elif position + 1 >= slot.limit:
            reason = LENGTH
        if child is None or reason != RUNNING:
            break
        node = child
    return Outcome(tuple(tokens), accepted, reason, len(tree.token) - 1 if slot.active else 0)


def commit(slot: Slot, outcome: Outcome) -> None:
    """Commit the tokens of a round. A slot without tokens keeps its drafts."""
    if outcome.tokens:
        slot.n += len(outcome.tokens)
        slot.tree = chain(outcome.tokens[-1])
        slot.kinds = ()
        slot.q = ()
    slot.active = slot.active and outcome.reason == RUNNING


def adjusted(slot: Slot, node: int, logits: np.ndarray, legal: BoolArray) -> np.ndarray:
    """Return the adjusted float32 logits of a node's row.

    The output consists of the tokens at joining and the path to the node.
    """
    a = slot.adjust
    size = logits.size
    path = slot.tree.path(node)
    if a is None:
        return logits
    p = a.params
    bias = np.full(size, 0 if p.allowed_ids is None else -np.inf, np.float32)
    bias[list(p.allowed_ids or [])] = 0
    for token, value in (p.logit_bias or {}).items():
        bias[token] += np.float32(value)
    bias[list(p.banned_ids or [])] = -np.inf
    x = np.where(bias == -np.inf, bias, logits + bias)
    counts = np.bincount([*a.output, *path], minlength=size).astype(np.float32)
    seen = (counts > 0) | np.isin(np.arange(size), a.prompt)
    repetition = np.float32(p.repetition_penalty)
    x = np.where(seen, np.where(x > 0, x / repetition, x * repetition), x)
    x = x - np.float32(p.frequency_penalty) * counts
    x = np.where(counts > 0, x - np.float32(p.presence_penalty), x)
    stops = np.isin(np.arange(size), slot.stop_ids)
    num_output = len(a.output) + len(path)
    early = num_output < p.min_tokens
    if early and (legal & ~stops & (x > -np.inf)).any():
        x[stops] = -np.inf
    return x


def verify(slot: Slot, logits: np.ndarray, masks: Sequence[MaskRow], token_limit: int) -> Outcome:
    """One round of one slot: logits [width, V] and mask rows by node; the slot moves on.

    Every node samples a token with the random numbers of its position, and the walk follows the
    child with this token, which is exact on any tree. A chain with at least one draft that was
    sampled from a table is tested instead, unless the request is greedy or coupled. For point
    masses, a test would not accept more.
    """
    tree = slot.tree.first(len(logits) - 1)
    most = len(tree.token) - 1

    def row(node: int, position: int) -> tuple[int, Any]:
        state = masks[node].counts_as(slot, position)
        if state not in (FREE, READY):
            return state, None
        legal = masks[node].allows(logits.shape[1], token_limit)
        x = adjusted(slot, node, logits[node], legal)
        return broken(x, legal) or state, (x, legal)

    chosen: dict[int, int] = {}  # results of tests, by node
    drawn = DENSE in slot.kinds[:most] and tree.parent == tuple(range(-1, most))
    testing = drawn and not slot.filter.greedy and slot.verify in (REJECTION, PER_TOKEN)
    if testing:
        rows = [row(j, slot.n + j) for j in range(most)]
        usable = itertools.takewhile(lambda row: row[0] in (FREE, READY), rows)
        laws = [distribution(*row[1], slot.filter) for row in usable]
        chosen = dict(enumerate(_tested(slot, laws)))

    def decide(node: int, position: int, row: tuple[Any, BoolArray]) -> tuple[int, int | None]:
        x, legal = row
        if slot.filter.greedy:
            token = int(np.argmax(np.where(legal, x, -np.inf)))
        elif not testing or node == most:
            p = distribution(x, legal, slot.filter)
            token = draw(p, slot.seed, position, NOISE, sample=slot.sample)
        else:
            token = chosen.get(node, -1)
        if slot.verify == RELAXED and slot.relaxed.until not in tree.path(node):
            p = distribution(x, legal, Filter() if slot.filter.greedy else slot.filter)
            token = _relaxed(slot.relaxed, tree, node, p, token)
        return token, tree.child(node, token)

    outcome = walk(slot, row, decide, tree)
    commit(slot, outcome)
    if slot.verify == RELAXED and slot.relaxed.until in outcome.tokens:
        slot.verify = COUPLED
    return outcome


def _relaxed(how: Any, tree: Tree, node: int, p: FloatArray, token: int) -> int:
    """Return the most likely acceptable child, unless a child has the token; else the token."""
    children = [tree.token[j] for j, parent in enumerate(tree.parent) if parent == node]
    good = [d for d in ranking(p)[: how.top_k] if p[d] > 0 and p[d] >= p.max() - how.delta]
    return next((int(d) for d in good if d in children and token not in children), token)


def broken(logits: np.ndarray, legal: BoolArray) -> int:
    """Return DEAD_END without a legal token, ERROR with a NaN or +inf legal logit, else 0."""
    seen = logits[legal]
    if np.isnan(seen).any() or (seen == np.inf).any():
        return ERROR
    return 0 if (seen > -np.inf).any() else DEAD_END


def block_chances(
    drafts: Sequence[int], p: Sequence[FloatArray], q: Sequence[FloatArray]
) -> tuple[list[float], list[float]]:
    """Return weights P and acceptance probabilities h for 0, 1, .. drafts; draft i came from q[i].

    Block verification (Sun et al., ICLR 2025, arXiv 2403.10444): the last i whose coin is below
    h[i] is the number of accepted drafts, whether or not earlier ones failed. The next token is
    sampled from max(P[i] p[i] - q[i], 0).
    """
    weight = [1.0]
    chance = []
    for i, d in enumerate(drafts):
        left = np.maximum(weight[i] * p[i] - q[i], 0.0).sum()
        chance.append(1.0 if weight[i] >= 1 else left / (left + 1 - weight[i]))
        known = 0 <= d < p[i].size and q[i][d] > 0
        weight.append(min(1.0, weight[i] * p[i][d] / q[i][d]) if known else 0.0)
    return weight, [*chance, weight[-1]]


def _tested(slot: Slot, p: list[FloatArray]) -> list[int]:
    """Return the tokens of a tested chain: accepted drafts, and the replacement of the next one.

    A point mass has a table with a single entry. `PER_TOKEN` accepts a draft if u q(d) < p(d) and
    ends at the first failure (Leviathan et al., 2023). If the residual is empty, p is used.
    """
    drafts = slot.drafts[: len(p)]
    q = [
        np.asarray(np.arange(law.size) == d, float) if kind == POINT else table
        for law, d, kind, table in zip(p, drafts, slot.kinds, slot.q, strict=False)
    ]
    u = [coin(slot.seed, slot.n + i, slot.sample, slot.n) for i in range(1, len(p) + 1)]
    weight, chance = block_chances(drafts, p, q)
    if slot.verify == PER_TOKEN:
        alone = [block_chances([d], [a], [b])[0][1] for d, a, b in zip(drafts, p, q, strict=True)]
        accepted = [*(x < c for x, c in zip(u, alone, strict=True)), False].index(False)
        weight = [1.0] * (len(p) + 1)
    else:
        accepted = max([0, *(i for i, x in enumerate(u, 1) if x < chance[i])])
    if accepted == len(p):
        return list(drafts)
    left = weight[accepted] * p[accepted] - q[accepted]
    position = slot.n + accepted + 1
    for weights in (np.maximum(left, 0.0), p[accepted]):
        token = draw(weights, slot.seed, position, RESIDUAL, None, slot.sample, slot.n)
        if token >= 0:
            break
    return [*drafts[:accepted], token]


def may_grow(slot: Slot, node: int) -> bool:
    """Return whether a node may have children. This depends on the prefix only."""
    ended = node > 0 and slot.tree.token[node] in slot.stop_ids
    return slot.active and slot.n + len(slot.tree.path(node)) + 1 < slot.limit and not ended


def is_drafting(slot: Slot, j: int) -> bool:
    """Return whether draft j (from 1) of a chain is to be generated."""
    return len(slot.drafts) == j - 1 and may_grow(slot, j - 1)


def keep(
    slot: Slot, token: int, kind: int = POINT, q: Any = None, parent: int | None = None
) -> None:
    """Append a draft below a node, or to a chain."""
    slot.tree = slot.tree.grow(len(slot.drafts) if parent is None else parent, token)
    slot.kinds = (*slot.kinds, kind)
    slot.q = (*slot.q, q)


def draft(
    slot: Slot,
    j: int,
    logits: np.ndarray,
    mask: MaskRow | None,
    token_limit: int,
    d2t: np.ndarray | None,
    vocab_size: int,
    *,
    probed: bool = False,
    answer: int = -1,
) -> None:
    """Generate draft j of a slot, if drafting continues (mask None: unmasked).

    The answer to a probe is the draft, else the token that the row forces. Otherwise it is sampled:
    with the target's random numbers for coupled and probed requests, from a stored table q for
    others.
    """
    position = slot.n + j
    if not is_drafting(slot, j):
        return
    token = answer
    if token < 0 and mask is not None:
        token = mask.forced(slot, position - 1)
    if token >= 0:
        return keep(slot, token)
    if mask is None:
        mask = MaskRow(FREE, slot.epoch, position - 1)
    state = mask.counts_as(slot, position - 1)
    if state not in (FREE, READY):
        return None
    ids = np.arange(logits.size) if d2t is None else d2t
    inside = (ids >= 0) & (ids < vocab_size)
    legal = inside & mask.allows(vocab_size, token_limit)[np.where(inside, ids, 0)]
    if broken(logits, legal):
        return None
    free = mask.state == FREE and mask.detail
    coupled = slot.verify in (COUPLED, RELAXED) or (probed and not free)
    if slot.filter.greedy:
        return keep(slot, int(ids[np.argmax(np.where(legal, logits, -np.inf))]))
    p = distribution(logits, legal, slot.filter)
    q = np.zeros(vocab_size)
    purpose = NOISE if coupled else DRAFT
    round_start = 0 if coupled else slot.n
    column = draw(
        p, slot.seed, position, purpose, ids=ids, sample=slot.sample, round_start=round_start
    )
    q[ids[legal]] = p[legal]
    return keep(slot, int(ids[column]), POINT if coupled else DENSE, q)


def candidates(slot: Slot, j: int, logits: np.ndarray, ids: np.ndarray, token_limit: int) -> list:
    """Return the ids to probe for draft j in the order in which the target will prefer them.

    Ids that the filters remove come last, because the mask, which is not known yet, may remove the
    others.
    """
    legal = (ids >= 0) & (ids < token_limit)
    if broken(logits, legal):
        return []
    legal &= logits > -np.inf
    order = [c for c in ranking(logits) if legal[c]]
    if not slot.filter.greedy:
        kept = distribution(logits, legal, slot.filter)
        scaled = logits.astype(np.float64) / np.float64(np.float32(slot.filter.temperature))
        noise = gumbel(words(slot.seed, slot.n + j, NOISE, np.maximum(ids, 0), slot.sample))
        order.sort(key=lambda c: (kept[c] <= 0, -scaled[c] - noise[c], c))
    return [int(ids[c]) for c in order]


def shares(slot: Slot, j: int, logits: np.ndarray, ids: np.ndarray, limit: int) -> dict[int, float]:
    """Return the probability of each legal id for draft j in the exponential race."""
    legal = (ids >= 0) & (ids < limit) & (logits > -np.inf)
    if broken(logits, legal):
        return {}
    plain = Filter(1.0) if slot.filter.greedy else slot.filter
    part = distribution(logits, legal, plain)
    if not slot.filter.greedy:
        noise = words(slot.seed, slot.n + j, NOISE, np.maximum(ids, 0), slot.sample)
        part = part * np.exp(gumbel(noise))
    return dict(zip(ids.tolist(), (part / part.sum()).tolist(), strict=True))


def record(exchange: Any, slot: int, replay: int, tokens: Sequence[int]) -> None:
    """Write the record of committed tokens; if there are any, there are no drafts."""
    exchange.committed[slot, : 2 + len(tokens)] = (replay, len(tokens), *tokens)
    if len(tokens):
        record_drafts(exchange, slot, replay, ())


def record_drafts(
    exchange: Any,
    slot: int,
    replay: int,
    drafts: Sequence[int],
    parents: Sequence[int] | None = None,
) -> None:
    """Write the record of drafts; without parents they are a chain."""
    exchange.drafted[slot, : 2 + len(drafts)] = (replay, len(drafts), *drafts)
    hang = range(len(drafts)) if parents is None else parents
    exchange.drafted[slot, 2 + exchange.layout["drafts"] :][: len(drafts)] = hang


def children(
    slot: Slot,
    position: int,
    logits: np.ndarray,
    ids: np.ndarray,
    token_limit: int,
    legal: Callable[[int], bool] | None,
    most: int,
    branch: int,
) -> list[tuple[float, int]]:
    """Return (log probability, id) of the children of a node, best first.

    These are the first `branch` ids among the best `most` that the grammar accepts. Probabilities
    exclude rejected candidates. Sampled requests use the race with the position's random numbers.
    """
    known = (ids >= 0) & (ids < token_limit)
    if broken(logits, known):
        return []
    x = np.where(known & (logits > -np.inf), logits.astype(np.float64), -np.inf)
    if not slot.filter.greedy:
        noise = gumbel(words(slot.seed, position, NOISE, np.maximum(ids, 0), slot.sample))
        x = x / np.float64(np.float32(slot.filter.temperature)) + noise
    value = x - x.max() - np.log(np.exp(x - x.max()).sum())
    found = []
    refused = 0.0
    for c in ranking(value)[:most]:
        if (
            x[c] - x.max() <= np.log(1e-30) or len(found) == branch
        ):  # kernels treat smaller values as 0
            break
        if legal is None or legal(int(ids[c])):
            found.append((float(np.exp(value[c])), int(ids[c])))
        else:
            refused += np.exp(value[c])
    left = max(1 - refused, sum(p for p, _ in found))
    return [(float(np.log(p / left)), token) for p, token in found]


def grow(
    slot: Slot,
    branch: int,
    levels: int,
    drafts: int,
    room: int,
    children_of: Callable[[tuple[int, ...]], list[tuple[float, int]]],
) -> tuple[Tree, list[int], float]:
    """The tree of drafts that grows from `children_of` the paths, how many were fed by level, and
    the smallest difference of two scores: one below rounding may be seen otherwise elsewhere.

    The best `branch` of a level are fed, the best `drafts` of all that were seen are kept, in this
    order; of equals the one that was seen earlier. Whatever is kept, its parent is.
    """
    seen: list[tuple[float, tuple[int, ...]]] = []
    fed = [(0.0, ())]
    feeds = []
    for level in range(1, levels + 1):
        first = len(seen)
        for score, path in fed:
            seen += [(score + value, (*path, token)) for value, token in children_of(path)]
        open_ = slot.n + level + 1 < slot.limit and level < levels
        fed = sorted(
            (s for s in seen[first:] if open_ and s[1][-1] not in slot.stop_ids),
            key=lambda s: -s[0],
        )[:branch]
        feeds.append(len(fed))
    kept = sorted(range(len(seen)), key=lambda i: -seen[i][0])[:drafts]
    paths = [seen[i][1] for i in kept][: max(room - slot.n - 1, 0)]
    gaps = np.diff(np.unique([score for score, _ in seen]))
    return tree_of(slot.last, paths), feeds, gaps.min(initial=1)


def grow_given(
    slot: Slot,
    ranks: Collection[tuple[int, ...]],
    room: int,
    children_of: Callable[[tuple[int, ...], tuple[int, ...]], list[tuple[float, int]]],
) -> tuple[Tree, list[int], float]:
    """Grow a tree of fixed shape; parameters and results as in `grow`."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    feeds = [0] * max(map(len, ranks))
    gap = 1.0
    for above in sorted({r[:-1] for r in ranks}, key=lambda r: (len(r), r)):
        path = found.get(above)
        ended = path and (path[-1] in slot.stop_ids or slot.n + len(path) + 1 >= slot.limit)
        if path is None or ended:
            continue
        children = children_of(path, above)
        feeds[len(above)] += 1
        gap = min([gap, *np.diff(np.unique([value for value, _ in children]))])
        for rank, (_, token) in enumerate(children):
            if (*above, rank) in ranks:
                found[*above, rank] = (*path, token)
    paths = [found[r] for r in sorted(found, key=lambda r: (len(r), r)) if r]
    return tree_of(slot.last, paths[: max(room - slot.n - 1, 0)]), feeds, gap


def tree_of(last: int, paths: list[tuple[int, ...]]) -> Tree:
    """Return the tree of paths in this order."""
    parents = [paths.index(p[:-1]) + 1 if len(p) > 1 else 0 for p in paths]
    return Tree((last, *(p[-1] for p in paths)), (-1, *parents))


def legal_tree(
    last: int,
    levels: Sequence[Sequence[tuple[int, float]]],
    branch: int,
    drafts: int,
    tests: int,
    legal: Callable[[tuple[int, ...], int], bool],
    ended: Callable[[tuple[int, ...]], bool],
) -> Tree:
    """Return the most likely legal drafts that `tests` grammar tests find in a lattice.

    `levels` has (id, probability) of each level. At most `branch` children per node, none after an
    ended path. The probability of a node is the product along its path, each relative to the
    candidates that have not been rejected there. The most likely next candidate of all nodes is
    tested, among equals that of the earlier node.
    """
    tree = chain(last)
    score = [1.0]
    left = [1.0]
    waiting = []

    def wait(node: int, c: int) -> None:
        path = tree.path(node)
        here = levels[len(path)] if len(path) < len(levels) else ()
        if c < len(here) and tree.parent.count(node) < branch and not ended(path):
            share = here[c][1]
            chance = share / left[node] if share < left[node] else 1.0
            heapq.heappush(waiting, (-score[node] * chance, node, c))

    wait(0, 0)
    while waiting and len(tree.token) <= drafts and tests:
        tests -= 1
        chance, node, c = heapq.heappop(waiting)
        path = tree.path(node)
        token, share = levels[len(path)][c]
        if legal(path, token):
            tree = tree.grow(node, token)
            score = [*score, -chance]
            left = [*left, 1.0]
            wait(len(tree.token) - 1, 0)
        else:
            left[node] -= share
        wait(node, c + 1)
    return tree
