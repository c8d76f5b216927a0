"""Reference implementation of a round of guided speculative decoding.

It is the oracle of the sampling kernels: tests/sampling compares tokens, drafts, mask rows and slot
state with it. The simulated devices take the rules of verification, commit and drafting from it
(`round_simulator`). It is itself compared with sequential decoding in test_reference_round.py, and
with exact distributions in test_exact_laws.py.

A slot's drafts are a tree. Node 0 is the last committed token, at position `n`. The other nodes are
drafts, with ``parent[j] < j``; a chain has ``parent[j] = j - 1``. A node of depth e is at position
n + e. Its mask row and its logits decide the token at position n + e + 1. A round has three parts:

1. Verification (`walk`). Beginning with node 0, each node's row decides a token. If a child has
   this token, verification continues at the child; otherwise it ends. Verification may end without
   a bonus token directly after an accepted draft: if the next row is not ready, at a stop id, or at
   the limit. A sampled draft is always tested before verification ends.
2. Commit (`commit`). The tokens are added, and the last one becomes the new node 0. The request may
   end.
3. Drafting (`draft`). Whether a draft is generated depends on the tokens before the draft
   (`may_grow`) and on the state of the mask row, never on the token that would be sampled.

The reference uses float64, sorts distributions, samples by the Gumbel-max trick (argmax of log p +
Gumbel noise), and processes one request after the other. It shares no algorithm with the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
# States of a mask row.
NOT_READY = 0
FREE = 1
READY = 2
DEAD_END = 3
ERROR = 4
# Reasons for which a request ended.
RUNNING = 0
STOP = 1
LENGTH = 2
DEAD = 3
FAULT = 4
# Verification modes.
REJECTION = 0
COUPLED = 1
PER_TOKEN = 2
RELAXED = 3
#: Distribution that a draft was sampled from: a table q, or a point mass.
DENSE = 0
POINT = 1


def philox4x32_10(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return Philox4x32-10 of a counter uint32 [..., 4] and a key uint32 [..., 2]."""
    c0, c1, c2, c3 = np.moveaxis(counter.astype(np.uint64), -1, 0)
    k0, k1 = np.moveaxis(key.astype(np.uint64), -1, 0)
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    multiplier0 = np.uint64(0xD2511F53)
    multiplier1 = np.uint64(0xCD9E8D57)
    increment0 = np.uint64(0x9E3779B9)
    increment1 = np.uint64(0xBB67AE85)
    for _ in range(10):
        product0 = multiplier0 * c0
        product1 = multiplier1 * c2
        c0 = (product1 >> half) ^ c1 ^ k0
        c1 = product1 & low
        c2 = (product0 >> half) ^ c3 ^ k1
        c3 = product0 & low
        k0 = (k0 + increment0) & low
        k1 = (k1 + increment1) & low
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def words(
    seed: int, position: int, purpose: int, ids: np.ndarray, sample: int = 0, round_start: int = 0
) -> np.ndarray:
    """Return the random word of each id for a seed, position, purpose and round."""
    ids = np.asarray(ids)
    purpose_and_sample = purpose | sample << 8
    parts = np.broadcast_arrays(position, purpose_and_sample, ids // 4, round_start)
    counter = np.stack(parts, axis=-1).astype(np.uint32)
    low = seed & 0xFFFFFFFF
    high = seed >> 32 & 0xFFFFFFFF
    key = np.broadcast_to(np.array([low, high], np.uint32), (*ids.shape, 2))
    drawn = philox4x32_10(counter, key)
    index = (ids % 4)[..., None]
    return np.take_along_axis(drawn, index, axis=-1)[..., 0]


def uniform(word: np.ndarray) -> FloatArray:
    """Return a uniform number in [0, 1) with 24 bits."""
    bits24 = np.asarray(word, np.uint32) >> np.uint32(8)
    return bits24.astype(np.float64) * 2.0**-24


def gumbel(word: np.ndarray) -> FloatArray:
    """Return the Gumbel variate of a random word."""
    v = (np.asarray(word, np.float64) + 0.5) * 2.0**-32
    v = np.minimum(v, 1.0 - 2.0**-24)
    exponential = -np.log1p(-v)
    return -np.log(exponential)


def coin(seed: int, position: int, sample: int, round_start: int) -> float:
    """Return the random number in [0, 1) with which rejection sampling tests a draft."""
    word = words(seed, position, COIN, np.array([0]), sample, round_start)
    return float(uniform(word)[0])


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
    if ids is None:
        ids = np.arange(weights.size)
    noise = gumbel(words(seed, position, purpose, ids, sample, round_start))
    with np.errstate(divide="ignore"):
        log_weights = np.log(np.maximum(weights, 0))
    scores = np.where(weights > 0, log_weights + noise, -np.inf)
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
    # The kernels' parameters are float32.
    temperature = np.float64(np.float32(f.temperature))
    top_p = np.float64(np.float32(f.top_p))
    min_p = np.float64(np.float32(f.min_p))
    legal = legal & (logits > -np.inf)
    x = np.where(legal, logits.astype(np.float64), -np.inf) / temperature
    p = np.exp(x - x.max())
    order = ranking(np.where(legal, logits, -np.inf))
    if f.top_k > 0:
        p[order[f.top_k :]] = 0.0
    if top_p < 1.0:
        reached = np.cumsum(p[order]) >= top_p * p.sum() * (1 - 1e-12)
        last = int(np.argmax(reached))
        p[order[last + 1 :]] = 0.0
    if f.min_p > 0.0:
        p[p < min_p * p.max()] = 0.0
    return p / p.sum()


def pack_bits(legal: np.ndarray) -> np.ndarray:
    """Return mask words (int32 [..., ceil(V/32)]): id i is bit i % 32 of word i // 32."""
    size = legal.shape[-1]
    num_words = -(-size // 32)
    padded = np.zeros((*legal.shape[:-1], 32 * num_words), np.uint8)
    padded[..., :size] = legal
    return np.packbits(padded, axis=-1, bitorder="little").view(np.int32)


def bits(row: np.ndarray) -> np.ndarray:
    """Return the ids whose bit is set in a mask row."""
    octets = np.ascontiguousarray(row).view(np.uint8)
    return np.flatnonzero(np.unpackbits(octets, bitorder="little"))


@dataclass(frozen=True)
class Tree:
    """Tokens and parents of nodes, parents before children; siblings have different tokens."""

    token: tuple[int, ...]
    parent: tuple[int, ...]

    def grow(self, node: int, token: int) -> Tree:
        """Return the tree with an additional last node that is a child of `node`."""
        return Tree((*self.token, token), (*self.parent, node))

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` with this token; None if there is none."""
        for j, parent in enumerate(self.parent):
            if parent == node and self.token[j] == token:
                return j
        return None

    def children(self, node: int) -> list[int]:
        """Return the children of a node."""
        return [j for j, parent in enumerate(self.parent) if parent == node]

    def nodes(self, node: int) -> tuple[int, ...]:
        """Return the nodes on the path to a node, without node 0."""
        if node == 0:
            return ()
        return (*self.nodes(self.parent[node]), node)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the tokens on the path to a node, without node 0."""
        return tuple(self.token[j] for j in self.nodes(node))

    def route(self, node: int) -> int:
        """Return the drafts on the path to a node as bits: bit j - 1 is draft j."""
        return sum(1 << (j - 1) for j in self.nodes(node))

    def first(self, drafts: int) -> Tree:
        """Return the tree of node 0 and the first `drafts` drafts."""
        return Tree(self.token[: drafts + 1], self.parent[: drafts + 1])


def chain(last: int, *drafts: int) -> Tree:
    """Return a tree without branches."""
    return Tree((last, *drafts), tuple(range(-1, len(drafts))))


@dataclass(frozen=True)
class Adjustment:
    """Logit adjustments of a request, its prompt, and its output up to the last commit."""

    params: SamplingParams
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


@dataclass
class Slot:
    """A request between two rounds."""

    n: int  # position of the last committed token
    tree: Tree
    limit: int  # exclusive upper bound of token positions
    seed: int = 0
    filter: Filter = field(default_factory=Filter)
    verify: int = REJECTION
    epoch: int = 1
    sample: int = 0
    active: bool = True
    stop_ids: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()  # kind of each draft: POINT or DENSE
    q: tuple[Any, ...] = field(default=(), repr=False)  # each draft's distribution over target ids
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
    """A mask row and its stamp, ``struct RowStamp`` of native/records/exchange.h."""

    state: int
    epoch: int
    position: int
    legal: Any = None  # bool [V], whether each token id is legal
    # Of a free row: 1 if the request has no grammar. Of a ready row: 1 + the forced token, or 0.
    detail: int = 0

    def counts_as(self, slot: Slot, position: int) -> int:
        """Return the state of the row for `slot` at a node's position.

        A row with another epoch or position is not ready. Free rows of a request without a grammar
        are free at every position.
        """
        if self.epoch != slot.epoch:
            return NOT_READY
        has_no_grammar = self.state == FREE and self.detail != 0
        if has_no_grammar or self.position == position:
            return self.state
        return NOT_READY

    def forced(self, slot: Slot, position: int) -> int:
        """Return the token that the grammar forces; -1 if there is none."""
        if self.counts_as(slot, position) != READY:
            return -1
        return self.detail - 1

    def allows(self, size: int, token_limit: int) -> BoolArray:
        """Return the legality of each id for a free or ready row."""
        allowed = np.arange(size) < token_limit
        if self.state != FREE:
            allowed &= self.legal[:size]
        return allowed


@dataclass(frozen=True)
class Outcome:
    """Result of verification."""

    tokens: tuple[int, ...] = ()
    accepted: int = 0  # accepted drafts
    reason: int = RUNNING
    tested: int = 0  # number of verified drafts
    relaxed: int = 0  # accepted drafts that exact verification would have rejected


def walk(
    slot: Slot,
    row: Callable[[int, int], tuple[int, Any]],
    decide: Callable[[int, int, Any], tuple[int, int | None]],
    tree: Tree | None = None,
) -> Outcome:
    """Follow `tree`, by default the slot's, from node 0 on while nodes are accepted.

    ``row(node, position)`` returns the state of the node's mask row, and an object for `decide`.
    ``decide(node, position, object)`` returns the token at `position`, and the child with this
    token if the child is accepted. The slot does not change.
    """
    if tree is None:
        tree = slot.tree
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
            # After an accepted draft, the round ends without an error, and the next round begins
            # with this row.
            if not tokens and state == DEAD_END:
                reason = DEAD
            if not tokens and state == ERROR:
                reason = FAULT
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
    tested = len(tree.token) - 1 if slot.active else 0
    return Outcome(tuple(tokens), accepted, reason, tested)


def commit(slot: Slot, outcome: Outcome) -> None:
    """Commit the tokens of a round. If no token is committed, the slot keeps its drafts."""
    if outcome.tokens:
        if slot.adjust is not None:
            output = (*slot.adjust.output, *outcome.tokens)
            slot.adjust = replace(slot.adjust, output=output)
        slot.n += len(outcome.tokens)
        slot.tree = chain(outcome.tokens[-1])
        slot.kinds = ()
        slot.q = ()
    slot.active = slot.active and outcome.reason == RUNNING


def adjusted(slot: Slot, node: int, logits: np.ndarray, legal: BoolArray) -> np.ndarray:
    """Return the float32 logits of a node's row after bias, penalties and `min_tokens`.

    The tokens of the request's output are those of the last commit and those on the path to the
    node.
    """
    if slot.adjust is None:
        return logits
    path = slot.tree.path(node)
    x = _with_bias_and_penalties(slot.adjust, path, logits)
    stops = np.isin(np.arange(logits.size), slot.stop_ids)
    has_other = (legal & ~stops & (x > -np.inf)).any()
    num_output = len(slot.adjust.output) + len(path)
    if num_output < slot.adjust.params.min_tokens and has_other:
        x[stops] = -np.inf
    return x


def adjusted_draft(
    slot: Slot,
    path: Sequence[int],
    logits: np.ndarray,
    ids: np.ndarray,
    vocab_size: int,
    *,
    depth: int | None = None,
) -> np.ndarray:
    """Return the float32 logits of the drafter after bias, penalties and `min_tokens`.

    Before `min_tokens` tokens, stop ids are not drafted, even if no other id is left. `path`
    contains the drafts on the path to the row, as far as they are known. `depth` is the number of
    all drafts on this path, by default that of the known ones. `ids` is the target id of each
    column of the logits, and `vocab_size` the number of target ids.
    """
    if slot.adjust is None:
        return logits
    inside = (ids >= 0) & (ids < vocab_size)
    by_id = np.zeros(vocab_size, np.float32)
    by_id[ids[inside]] = logits[inside]
    x = _with_bias_and_penalties(slot.adjust, path, by_id)
    num_output = len(slot.adjust.output) + (len(path) if depth is None else depth)
    if num_output < slot.adjust.params.min_tokens:
        x[list(slot.stop_ids)] = -np.inf
    result = logits.copy()
    result[inside] = x[ids[inside]]
    return result


def _with_bias_and_penalties(
    adjustment: Adjustment, path: Sequence[int], logits: np.ndarray
) -> np.ndarray:
    """Return logits with bias and penalties, after the output and the drafts of a path."""
    params = adjustment.params
    ids = np.arange(logits.size)
    bias = _logit_bias(params, logits.size)
    x = np.where(bias == -np.inf, bias, logits + bias)
    output = np.array([*adjustment.output, *path], np.int64)
    counts = np.bincount(output, minlength=logits.size).astype(np.float32)
    seen = (counts > 0) | np.isin(ids, adjustment.prompt)
    repetition = np.float32(params.repetition_penalty)
    repeated = np.where(x > 0, x / repetition, x * repetition)
    x = np.where(seen, repeated, x)
    x = x - np.float32(params.frequency_penalty) * counts
    return np.where(counts > 0, x - np.float32(params.presence_penalty), x)


def _logit_bias(params: SamplingParams, size: int) -> np.ndarray:
    """Return the bias of each id; -inf for ids that are not allowed."""
    bias = np.zeros(size, np.float32)
    if params.allowed_ids is not None:
        bias[:] = -np.inf
        bias[list(params.allowed_ids)] = 0
    for token, value in (params.logit_bias or {}).items():
        bias[token] += np.float32(value)
    bias[list(params.banned_ids or [])] = -np.inf
    return bias


def verify(slot: Slot, logits: np.ndarray, masks: Sequence[MaskRow], token_limit: int) -> Outcome:
    """Verify the drafts of a slot and commit the tokens.

    In most cases, every node samples a token with the random numbers of its position, and `walk`
    follows the child with this token. This preserves the distribution on any tree.

    A chain with at least one draft that was sampled from a stored distribution `q` is verified by
    rejection sampling instead, unless the request is greedy or coupled. If no draft has a stored
    distribution, rejection sampling would not accept more drafts, so it is not used.

    `logits` [rows, V] are the target's logits of the first nodes; the other nodes are ignored.
    `masks` has the mask row of each node. Ids at or above `token_limit` are illegal.
    """
    tree = slot.tree.first(len(logits) - 1)
    last_node = len(tree.token) - 1

    def row(node: int, position: int) -> tuple[int, Any]:
        state = masks[node].counts_as(slot, position)
        if state not in (FREE, READY):
            return state, None
        legal = masks[node].allows(logits.shape[1], token_limit)
        x = adjusted(slot, node, logits[node], legal)
        return broken(x, legal) or state, (x, legal)

    chosen: dict[int, int] = {}  # tokens that rejection sampling has chosen, by node
    relaxed_nodes: list[int] = []  # nodes whose token the target did not sample
    is_chain = tree.parent == tuple(range(-1, last_node))
    has_dense = DENSE in slot.kinds[:last_node]
    can_test = not slot.filter.greedy and slot.verify in (REJECTION, PER_TOKEN)
    testing = is_chain and has_dense and can_test
    if testing:
        p = []
        for j in range(last_node):
            state, allowed = row(j, slot.n + j)
            if state not in (FREE, READY):
                break
            p.append(distribution(*allowed, slot.filter))
        chosen = dict(enumerate(_tested(slot, p)))

    def decide(node: int, position: int, row: tuple[Any, BoolArray]) -> tuple[int, int | None]:
        x, legal = row
        if slot.filter.greedy:
            token = int(np.argmax(np.where(legal, x, -np.inf)))
        elif not testing or node == last_node:
            p = distribution(x, legal, slot.filter)
            token = draw(p, slot.seed, position, NOISE, sample=slot.sample)
        else:
            token = chosen.get(node, -1)
        if slot.verify == RELAXED and slot.relaxed.until not in tree.path(node):
            f = Filter() if slot.filter.greedy else slot.filter
            p = distribution(x, legal, f)
            sampled = token
            token = _relaxed(slot.relaxed, tree, node, p, sampled)
            if token != sampled:
                relaxed_nodes.append(node)
        return token, tree.child(node, token)

    outcome = walk(slot, row, decide, tree)
    outcome = replace(outcome, relaxed=len(relaxed_nodes))
    commit(slot, outcome)
    if slot.verify == RELAXED and slot.relaxed.until in outcome.tokens:
        slot.verify = COUPLED
    return outcome


def _relaxed(how: Any, tree: Tree, node: int, p: FloatArray, token: int) -> int:
    """Return the token that relaxed verification chooses for a node.

    This is `token` if a child has it. Otherwise it is the most likely child that the relaxed
    criterion accepts, or `token` if there is no such child.
    """
    drafts = [tree.token[j] for j in tree.children(node)]
    if token in drafts:
        return token
    lowest = p.max() - how.delta
    for d in ranking(p)[: how.top_k]:
        if p[d] > 0 and p[d] >= lowest and d in drafts:
            return int(d)
    return token


def broken(logits: np.ndarray, legal: BoolArray) -> int:
    """Return ERROR if a legal logit is NaN or +inf, DEAD_END if no token is legal, or else 0."""
    seen = logits[legal]
    if np.isnan(seen).any() or (seen == np.inf).any():
        return ERROR
    if (seen > -np.inf).any():
        return 0
    return DEAD_END


def block_chances(
    drafts: Sequence[int], p: Sequence[FloatArray], q: Sequence[FloatArray]
) -> tuple[list[float], list[float]]:
    """Return the weights and acceptance probabilities of block verification.

    Both lists have one entry for each possible number i of accepted drafts, from 0 to all: P[i] and
    h[i] in the notation of Sun et al. (ICLR 2025, arXiv 2403.10444). The accepted number is the
    greatest i for which a uniform random number is below h[i], whether or not smaller i failed. The
    next token is then sampled in proportion to max(P[i] p[i] - q[i], 0). `p` and `q` are the
    distributions of target and drafter at the position of each draft.
    """
    weights = [1.0]
    chances = []
    for d, target, table in zip(drafts, p, q, strict=False):
        weight = weights[-1]
        residual = np.maximum(weight * target - table, 0.0).sum()
        if weight >= 1:
            chances.append(1.0)
        else:
            chances.append(residual / (residual + 1 - weight))
        if 0 <= d < target.size and table[d] > 0:
            weights.append(min(1.0, weight * target[d] / table[d]))
        else:
            weights.append(0.0)
    chances.append(weights[-1])
    return weights, chances


def _tested(slot: Slot, p: list[FloatArray]) -> list[int]:
    """Verify a chain by rejection sampling and return its tokens.

    The tokens are the accepted drafts and, if a draft is rejected, one token that is sampled from
    the residual distribution.

    A draft without a stored distribution counts as certain: its q is 1. `PER_TOKEN` accepts draft d
    if u q(d) < p(d), where u is a uniform random number, and ends at the first rejection (Leviathan
    et al., 2023). If the residual distribution is empty, the token is sampled from p.
    """
    drafts = slot.drafts[: len(p)]
    q = []
    for j, d in enumerate(drafts):
        if slot.kinds[j] == POINT:
            q.append(np.asarray(np.arange(p[j].size) == d, float))
        else:
            q.append(slot.q[j])
    coins = [coin(slot.seed, slot.n + i, slot.sample, slot.n) for i in range(1, len(p) + 1)]
    if slot.verify == PER_TOKEN:
        accepted = _num_passed_per_token(drafts, p, q, coins)
        weight = 1.0
    else:
        weights, chances = block_chances(drafts, p, q)
        accepted = 0
        for i, u in enumerate(coins, 1):
            if u < chances[i]:
                accepted = i
        weight = weights[accepted]
    if accepted == len(p):
        return list(drafts)
    residual = np.maximum(weight * p[accepted] - q[accepted], 0.0)
    position = slot.n + accepted + 1
    for distribution_ in (residual, p[accepted]):
        token = draw(distribution_, slot.seed, position, RESIDUAL, None, slot.sample, slot.n)
        if token >= 0:
            break
    return [*drafts[:accepted], token]


def _num_passed_per_token(
    drafts: Sequence[int], p: Sequence[FloatArray], q: Sequence[FloatArray], coins: Sequence[float]
) -> int:
    """Return the number of drafts before the first draft that fails its per-token test."""
    passed = 0
    for d, target, table, u in zip(drafts, p, q, coins, strict=True):
        weights, _ = block_chances([d], [target], [table])
        if not u < weights[1]:
            break
        passed += 1
    return passed


def may_grow(slot: Slot, node: int) -> bool:
    """Return whether a node may have children. This depends on the prefix only."""
    is_stop = node > 0 and slot.tree.token[node] in slot.stop_ids
    position = slot.n + len(slot.tree.path(node)) + 1
    return slot.active and position < slot.limit and not is_stop


def is_drafting(slot: Slot, j: int) -> bool:
    """Return whether draft j (from 1) of a chain is to be generated."""
    return len(slot.drafts) == j - 1 and may_grow(slot, j - 1)


def keep(
    slot: Slot, token: int, kind: int = POINT, q: Any = None, parent: int | None = None
) -> None:
    """Append a draft as a child of `parent`, by default of the last node."""
    if parent is None:
        parent = len(slot.drafts)
    slot.tree = slot.tree.grow(parent, token)
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
    """Generate draft j of a slot, if drafting continues.

    If the grammar has accepted a candidate, the draft is this candidate. Otherwise, if the mask row
    forces a token, the draft is this token. Otherwise the draft is sampled. Coupled requests, and
    requests with candidates, use the random numbers with which the target will sample. For other
    requests, the distribution q of the draft is stored for its verification.

    Drafts are numbered from 1. `mask` is mask row j - 1, or None if drafts are unmasked. Ids at or
    above `token_limit` are illegal. `d2t` is the target id of each column of the logits, or None if
    columns are ids, and `vocab_size` is the number of target ids. If the grammar tests candidates
    (`probed`), `answer` is the legal candidate, or -1.
    """
    position = slot.n + j
    if not is_drafting(slot, j):
        return
    token = answer
    if token < 0 and mask is not None:
        token = mask.forced(slot, position - 1)
    if token >= 0:
        keep(slot, token)
        return
    if mask is None:
        mask = MaskRow(FREE, slot.epoch, position - 1)
    if mask.counts_as(slot, position - 1) not in (FREE, READY):
        return
    ids = np.arange(logits.size) if d2t is None else d2t
    inside = (ids >= 0) & (ids < vocab_size)
    allowed = mask.allows(vocab_size, token_limit)
    legal = inside & allowed[np.where(inside, ids, 0)]
    if broken(logits, legal):
        return
    if slot.filter.greedy:
        column = np.argmax(np.where(legal, logits, -np.inf))
        keep(slot, int(ids[column]))
        return
    has_no_grammar = mask.state == FREE and mask.detail
    coupled = slot.verify in (COUPLED, RELAXED) or (probed and not has_no_grammar)
    p = distribution(logits, legal, slot.filter)
    q = np.zeros(vocab_size)
    q[ids[legal]] = p[legal]
    if coupled:
        column = draw(p, slot.seed, position, NOISE, ids, slot.sample)
        keep(slot, int(ids[column]), POINT, q)
    else:
        column = draw(p, slot.seed, position, DRAFT, ids, slot.sample, slot.n)
        keep(slot, int(ids[column]), DENSE, q)
