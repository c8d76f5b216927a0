"""One round of guided speculative decoding, stated once: the oracle of every test of a round.

A slot's drafts are a tree. Node 0 is the last committed token, at position `n`; the others are
drafts, with ``parent[j] < j``; a chain is ``parent[j] = j - 1``. A node of depth e stands at
position n + e: its mask row and its logits decide position n + e + 1. A round

1. verifies (`walk`): from node 0 on, each node's row decides a token; where a child holds that
   token the walk goes there, else it stops. A sampled draft is always tested: the walk may end
   after an accepted token (row not ready, stop id, limit), then without a bonus, never instead of
   a test;
2. commits (`commit`): the tokens, the new node 0, the end of the request;
3. drafts (`draft`) where the prefix lets it (`may_grow`, the row's state), whatever would be drawn.

Nothing here looks at how kernels compute: float64, distributions by sorting, draws by
argmax(log p + Gumbel), one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Bool = NDArray[np.bool_]
NOISE, DRAFT, COIN, RESIDUAL = 0, 1, 2, 3  # purposes of random numbers
NOT_READY, FREE, READY, DEAD_END, ERROR = range(5)  # states of a mask row
RUNNING, STOP, LENGTH, DEAD, FAULT = range(5)  # why a request ended
REJECTION, COUPLED = 0, 1  # how sampled drafts are tested
DENSE, POINT = 0, 1  # what a draft was drawn from: a table q, or nothing


def philox4x32_10(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32, ten rounds: counter uint32 [..., 4], key uint32 [..., 2] -> uint32 [..., 4]."""
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k = [key[..., i].astype(np.uint64) for i in range(2)]
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        a = np.uint64(0xD2511F53) * c[0]
        b = np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> half) ^ c[1] ^ k[0], b & low, (a >> half) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(c, axis=-1).astype(np.uint32)


def words(seed: int, position: int, purpose: int, ids: np.ndarray, sample: int = 0) -> np.ndarray:
    """Random word of each id for one (seed, position, purpose)."""
    ids = np.asarray(ids)
    parts = np.broadcast_arrays(position, purpose | sample << 8, ids // 4, 0)
    counter = np.stack(parts, axis=-1).astype(np.uint32)
    key = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint32)
    drawn = philox4x32_10(counter, np.broadcast_to(key, (*ids.shape, 2)))
    return np.take_along_axis(drawn, (ids % 4)[..., None], axis=-1)[..., 0]


def uniform(word: np.ndarray) -> F64:
    """Uniform in [0, 1) with 24 bits."""
    return (np.asarray(word, np.uint32) >> np.uint32(8)).astype(np.float64) * 2.0**-24


def gumbel(word: np.ndarray) -> F64:
    """Gumbel variate of a random word."""
    v = np.minimum((np.asarray(word, np.float64) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -np.log(-np.log1p(-v))


def coin(seed: int, position: int, sample: int = 0) -> float:
    """Uniform of the acceptance test of a position."""
    return float(uniform(words(seed, position, COIN, np.array([0]), sample))[0])


def draw(
    weights: F64, seed: int, position: int, purpose: int, ids: np.ndarray | None = None,
    sample: int = 0,
) -> int:  # fmt: skip
    """argmax(log weight + Gumbel by id), ties to the smaller column; -1 if all weights are 0."""
    weights = np.asarray(weights, np.float64)
    if not (weights > 0).any():
        return -1
    ids = np.arange(weights.size) if ids is None else ids
    noise = gumbel(words(seed, position, purpose, ids, sample))
    with np.errstate(divide="ignore"):
        scores = np.where(weights > 0, np.log(np.maximum(weights, 0)) + noise, -np.inf)
    return int(np.argmax(scores))


@dataclass(frozen=True)
class Filter:
    """Sampling parameters of a request."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        """Whether the request takes the most likely token."""
        return bool(np.float32(self.temperature) < np.float32(1e-5))


def ranking(logits: np.ndarray) -> np.ndarray:
    """Columns from best to worst; equal logits by smaller id."""
    return np.argsort(-logits.astype(np.float64), kind="stable")


def distribution(logits: np.ndarray, legal: np.ndarray, f: Filter) -> F64:
    """Mask, temperature, top-k, top-p, min-p, renormalise; ties by smaller id."""
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
    """Mask words (int32, last axis ceil(V/32)): id i is bit i % 32 of word i // 32."""
    size = legal.shape[-1]
    padded = np.zeros((*legal.shape[:-1], -(-size // 32) * 32), np.uint8)
    padded[..., :size] = legal
    return np.packbits(padded, axis=-1, bitorder="little").view(np.int32)


def bits(row: np.ndarray) -> np.ndarray:
    """Ids whose bit is set in the words of one mask row."""
    words = np.ascontiguousarray(row)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


@dataclass(frozen=True)
class Tree:
    """Tokens and parents of nodes, parents before children; siblings hold different tokens."""

    token: tuple[int, ...]
    parent: tuple[int, ...]

    def grow(self, node: int, token: int) -> Tree:
        """The tree with one more node, the last, under ``node``."""
        return Tree((*self.token, token), (*self.parent, node))

    def child(self, node: int, token: int) -> int | None:
        """The node under ``node`` that holds the token."""
        found = [j for j, p in enumerate(self.parent) if p == node and self.token[j] == token]
        return found[0] if found else None

    def path(self, node: int) -> tuple[int, ...]:
        """Tokens from below node 0 down to the node; as many as the node is deep."""
        return (*self.path(self.parent[node]), self.token[node]) if node else ()

    def route(self, node: int) -> int:
        """Bits of the drafts on the way to the node and of itself: bit j - 1 is draft j."""
        return self.route(self.parent[node]) | 1 << node - 1 if node else 0

    def first(self, drafts: int) -> Tree:
        """Node 0 and the first drafts."""
        return Tree(self.token[: drafts + 1], self.parent[: drafts + 1])


def chain(last: int, *drafts: int) -> Tree:
    """A tree without branches."""
    return Tree((last, *drafts), tuple(range(-1, len(drafts))))


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
    adjust: Any = None  # fields of graft.sampling.Adjust

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
    """A mask row with its stamp; ``legal`` by id.

    ``more`` of a free row: its request has no grammar. Of a ready row: 1 + the token that the
    grammar forces, or 0.
    """

    state: int
    epoch: int
    position: int
    legal: Any = None
    more: int = 0

    def counts_as(self, slot: Slot, position: int) -> int:
        """State for `slot` at a node's position: a row counts with this epoch and position; the
        free rows of a request without a grammar count at every position."""
        anywhere = self.state == FREE and self.more != 0
        mine = self.epoch == slot.epoch and (anywhere or self.position == position)
        return self.state if mine else NOT_READY

    def forced(self, slot: Slot, position: int) -> int:
        """The token that the grammar forces; -1: none."""
        return self.more - 1 if self.counts_as(slot, position) == READY else -1

    def allows(self, size: int, token_limit: int) -> Bool:
        """Legality of each id of a row that counts as free or ready."""
        ids = np.arange(size)
        return (ids < token_limit) & (True if self.state == FREE else self.legal[:size])


def row_at(exchange: Any, slot: int, j: int) -> MaskRow:
    """What mask row j of a slot says in exchange memory, but for its mask."""
    state, epoch, position, more = exchange.stamps[slot, j].tolist()
    return MaskRow(state, epoch, position, more=more)


@dataclass(frozen=True)
class Outcome:
    """What verification brings."""

    tokens: tuple[int, ...] = ()
    accepted: int = 0  # drafts among them
    reason: int = RUNNING
    tested: int = 0  # drafts there were


def walk(
    slot: Slot, row: Callable[[int, int], tuple[int, Any]],
    decide: Callable[[int, int, Any], tuple[int, int | None]], tree: Tree | None = None,
) -> Outcome:  # fmt: skip
    """Walk the slot's tree.

    ``row(node, position)`` gives the state of the node's row and what it allows, for a node at the
    position; ``decide(node, position, allowed)`` the token of the position behind it and the child
    that holds it, if that is accepted.
    """
    tree = slot.tree if tree is None else tree
    tokens: list[int] = []
    node, accepted, reason = 0, 0, RUNNING
    while slot.active:
        position = slot.n + len(tokens) + 1
        if position >= slot.limit:
            reason = LENGTH
            break
        state, allowed = row(node, position - 1)
        if state not in (FREE, READY):
            if not tokens:  # else the next round opens with this very row
                reason = {DEAD_END: DEAD, ERROR: FAULT}.get(state, RUNNING)
            break
        token, child = decide(node, position, allowed)
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
    """Move the slot on; one that got no token keeps its drafts, a stalled one is as before."""
    if outcome.tokens:
        slot.n += len(outcome.tokens)
        slot.tree, slot.kinds, slot.q = chain(outcome.tokens[-1]), (), ()
    slot.active = slot.active and outcome.reason == RUNNING


def adjusted(slot: Slot, node: int, logits: np.ndarray, legal: Bool) -> np.ndarray:
    """The float32 logits of a node's row as the slot's request wants them.

    What was generated is what was known at joining and the path to the node.
    """
    a, size, path = slot.adjust, logits.size, slot.tree.path(node)
    if a is None:
        return logits
    bias = np.full(size, 0 if a.allowed is None else -np.inf, np.float32)
    bias[list(a.allowed or [])] = 0
    for token, value in a.bias.items():
        bias[token] += np.float32(value)
    bias[list(a.banned)] = -np.inf
    x = np.where(bias == -np.inf, bias, logits + bias)
    counts = np.bincount([*a.output, *path], minlength=size).astype(np.float32)
    seen = (counts > 0) | np.isin(np.arange(size), a.prompt)
    repetition = np.float32(a.repetition)
    x = np.where(seen, np.where(x > 0, x / repetition, x * repetition), x)
    x = x - np.float32(a.frequency) * counts
    x = np.where(counts > 0, x - np.float32(a.presence), x)
    stops = np.isin(np.arange(size), slot.stop_ids)
    early = slot.n + len(path) + 1 < a.earliest
    if early and (legal & ~stops & (x > -np.inf)).any():
        x[stops] = -np.inf
    return x


def verify(slot: Slot, logits: np.ndarray, masks: Sequence[MaskRow], token_limit: int) -> Outcome:
    """One round of one slot: logits [width, V] and mask rows by node; the slot moves on.

    Greedy and coupled requests want one token per node, drawn with the noise of its position, and
    go where it leads; exact on any tree. Rejection sampling tests the draft of a chain.
    """
    tree = slot.tree.first(len(logits) - 1)

    def row(node: int, position: int) -> tuple[int, Any]:
        state = masks[node].counts_as(slot, position)
        if state not in (FREE, READY):
            return state, None
        legal = masks[node].allows(logits.shape[1], token_limit)
        x = adjusted(slot, node, logits[node], legal)
        return broken(x, legal) or state, (x, legal)

    def decide(node: int, position: int, row: tuple[Any, Bool]) -> tuple[int, int | None]:
        x, legal = row
        if slot.filter.greedy:
            token = int(np.argmax(np.where(legal, x, -np.inf)))
            return token, tree.child(node, token)
        p = distribution(x, legal, slot.filter)
        if slot.verify == COUPLED or node + 1 == len(tree.token):
            token = draw(p, slot.seed, position, NOISE, sample=slot.sample)
            return token, tree.child(node, token)
        token, accepted = _tested(slot, node, p, position)
        return token, node + 1 if accepted else None

    outcome = walk(slot, row, decide, tree)
    commit(slot, outcome)
    return outcome


def broken(logits: np.ndarray, legal: Bool) -> int:
    """DEAD_END without a legal token, ERROR with a legal logit that is no number; 0: neither."""
    seen = logits[legal]
    if np.isnan(seen).any() or (seen == np.inf).any():
        return ERROR
    return 0 if (seen > -np.inf).any() else DEAD_END


def _tested(slot: Slot, j: int, p: F64, position: int) -> tuple[int, bool]:
    """Draft j of a chain if it is accepted, else the token in its place; and whether it was.

    Accepted iff u q(d) < p(d), else from max(p - q, 0); a point draft has q(d) = 1. Where nothing
    is left of p, from p.
    """
    d = slot.drafts[j]
    known = 0 <= d < p.size
    q = np.asarray(np.arange(p.size) == d, float) if slot.kinds[j] == POINT else slot.q[j]
    qd, pd = (q[d], p[d]) if known else (0.0, 0.0)
    if qd > 0 and coin(slot.seed, position, slot.sample) * qd < pd:
        return d, True
    token = draw(np.maximum(p - q, 0.0), slot.seed, position, RESIDUAL, sample=slot.sample)
    if token < 0:
        token = draw(p, slot.seed, position, RESIDUAL, sample=slot.sample)
    return token, False


def may_grow(slot: Slot, node: int) -> bool:
    """Whether a node may have children: decided by the prefix, never by what would be drawn."""
    ended = node > 0 and slot.tree.token[node] in slot.stop_ids
    return slot.active and slot.n + len(slot.tree.path(node)) + 1 < slot.limit and not ended


def is_drafting(slot: Slot, j: int) -> bool:
    """Whether draft j (from 1) of a chain is to be made."""
    return len(slot.drafts) == j - 1 and may_grow(slot, j - 1)


def keep(
    slot: Slot, token: int, kind: int = POINT, q: Any = None, parent: int | None = None
) -> None:
    """Append a draft under a node, or to a chain."""
    slot.tree = slot.tree.grow(len(slot.drafts) if parent is None else parent, token)
    slot.kinds, slot.q = (*slot.kinds, kind), (*slot.q, q)


def draft(
    slot: Slot, j: int, logits: np.ndarray, mask: MaskRow | None, token_limit: int,
    d2t: np.ndarray | None, vocab_size: int, *, probed: bool = False, answer: int = -1,
) -> None:  # fmt: skip
    """Draft j of one slot (mask None: drafting without masks); none where drafting stops.

    The answer to a probe is the draft, then the token that the row forces. After a probe without a
    legal candidate it is the best of the row. Else it is drawn: with the target's own noise for
    coupled requests, and from a table q that is kept for rejection sampling.
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
    coupled = slot.verify == COUPLED
    if slot.filter.greedy or (probed and state == READY and not coupled):
        return keep(slot, int(ids[np.argmax(np.where(legal, logits, -np.inf))]))
    p, q = distribution(logits, legal, slot.filter), np.zeros(vocab_size)
    purpose = NOISE if coupled else DRAFT
    column = draw(p, slot.seed, position, purpose, ids=ids, sample=slot.sample)
    q[ids[legal]] = p[legal]
    return keep(slot, int(ids[column]), POINT if coupled else DENSE, q)


def candidates(slot: Slot, j: int, logits: np.ndarray, ids: np.ndarray, token_limit: int) -> list:
    """Ids to probe for draft j, best first: in the order of the draw to come; what the filters take
    away comes last, for the mask, not known yet, may take away the rest."""
    legal = (ids >= 0) & (ids < token_limit)
    if broken(logits, legal):
        return []
    legal &= logits > -np.inf
    order = [c for c in ranking(logits) if legal[c]]
    if not slot.filter.greedy and slot.verify == COUPLED:
        kept = distribution(logits, legal, slot.filter)
        scaled = logits.astype(np.float64) / np.float64(np.float32(slot.filter.temperature))
        noise = gumbel(words(slot.seed, slot.n + j, NOISE, np.maximum(ids, 0), slot.sample))
        order.sort(key=lambda c: (kept[c] <= 0, -scaled[c] - noise[c], c))
    return [int(ids[c]) for c in order]


def record(exchange: Any, slot: int, replay: int, tokens: Sequence[int]) -> None:
    """What verification tells the grammar: the tokens, and after some that there are no drafts."""
    exchange.committed[slot, : 2 + len(tokens)] = (replay, len(tokens), *tokens)
    if len(tokens):
        record_drafts(exchange, slot, replay, ())


def record_drafts(
    exchange: Any, slot: int, replay: int, drafts: Sequence[int],
    parents: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """What drafting tells the grammar, after every draft; without parents they are a chain."""
    exchange.drafted[slot, : 2 + len(drafts)] = (replay, len(drafts), *drafts)
    hang = range(len(drafts)) if parents is None else parents
    exchange.drafted[slot, 2 + exchange.layout["drafts"] :][: len(drafts)] = hang


def children(
    slot: Slot, position: int, logits: np.ndarray, ids: np.ndarray, token_limit: int,
    legal: Callable[[int], bool] | None, most: int, branch: int,
) -> list[tuple[float, int]]:  # fmt: skip
    """(log probability, id) of the children of a tree's node, best first.

    Of its best `most` ids those that the grammar takes, `branch` at most; their probabilities are
    those without what was refused on the way. Coupled requests race with the position's noise.
    """
    known = (ids >= 0) & (ids < token_limit)
    if broken(logits, known):
        return []
    x = np.where(known & (logits > -np.inf), logits.astype(np.float64), -np.inf)
    if not slot.filter.greedy:
        noise = gumbel(words(slot.seed, position, NOISE, np.maximum(ids, 0), slot.sample))
        x = x / np.float64(np.float32(slot.filter.temperature)) + noise
    value = x - x.max() - np.log(np.exp(x - x.max()).sum())
    found, refused = [], 0.0
    for c in ranking(value)[:most]:
        if value[c] == -np.inf or len(found) == branch:
            break
        if legal is None or legal(int(ids[c])):
            found.append((float(np.exp(value[c])), int(ids[c])))
        else:
            refused += np.exp(value[c])
    left = max(1 - refused, sum(p for p, _ in found))
    return [(float(np.log(p / left)), token) for p, token in found]


def grow(
    slot: Slot, branch: int, levels: int, drafts: int, room: int,
    children_of: Callable[[tuple[int, ...]], list[tuple[float, int]]],
) -> tuple[Tree, list[int], float]:  # fmt: skip
    """The tree of drafts that grows from `children_of` the paths, how many were fed by level, and
    the smallest difference of two scores: one below rounding may be seen otherwise elsewhere.

    The best `branch` of a level are fed, the best `drafts` of all that were seen are kept; of
    equals the one that was seen earlier. Whatever is kept, its parent is.
    """
    seen: list[tuple[float, tuple[int, ...]]] = []
    fed, feeds = [(0.0, ())], []
    for level in range(1, levels + 1):
        first = len(seen)
        for score, path in fed:
            seen += [(score + value, (*path, token)) for value, token in children_of(path)]
        open_ = slot.n + level + 1 < slot.limit and level < levels
        fed = sorted((s for s in seen[first:] if open_ and s[1][-1] not in slot.stop_ids),
                     key=lambda s: -s[0])[:branch]  # fmt: skip
        feeds.append(len(fed))
    kept = sorted(range(len(seen)), key=lambda i: -seen[i][0])[:drafts]
    paths = [seen[i][1] for i in sorted(kept)][: max(room - slot.n - 1, 0)]
    parents = [paths.index(p[:-1]) + 1 if len(p) > 1 else 0 for p in paths]
    gaps = np.diff(np.unique([score for score, _ in seen]))
    return Tree((slot.last, *(p[-1] for p in paths)), (-1, *parents)), feeds, gaps.min(initial=1)
