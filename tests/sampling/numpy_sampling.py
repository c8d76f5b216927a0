"""NumPy oracle of the sampling kernels: plain, in float64, written from the definitions.

Nothing here looks at how the kernels compute: distributions by sorting, draws by
argmax(log p + Gumbel), verification one request at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
NOISE, DRAFT, COIN, RESIDUAL = 0, 1, 2, 3
NOT_READY, FREE, READY, DEAD_END, ERROR = range(5)
RUNNING, STOP, LENGTH, DEAD, FAULT = range(5)
REJECTION, COUPLED = 0, 1
DENSE, POINT = 0, 1


def philox4x32_10(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32, ten rounds: counter uint32 [..., 4], key uint32 [..., 2] -> uint32 [..., 4]."""
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k = [key[..., i].astype(np.uint64) for i in range(2)]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a = np.uint64(0xD2511F53) * c[0]
        b = np.uint64(0xCD9E8D57) * c[2]
        c = [
            (b >> np.uint64(32)) ^ c[1] ^ k[0],
            b & low,
            (a >> np.uint64(32)) ^ c[3] ^ k[1],
            a & low,
        ]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(c, axis=-1).astype(np.uint32)


def words(seed: int, position: int, purpose: int, ids: np.ndarray, sample: int = 0) -> np.ndarray:
    """Random word of each id for one (seed, position, purpose)."""
    ids = np.asarray(ids)
    counter = np.zeros((*ids.shape, 4), np.uint32)
    counter[..., 0] = position
    counter[..., 1] = purpose | sample << 8
    counter[..., 2] = ids // 4
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
    weights: F64,
    seed: int,
    position: int,
    purpose: int,
    ids: np.ndarray | None = None,
    sample: int = 0,
) -> int:
    """argmax(log weight + Gumbel by id), ties to the smaller column; -1 if all weights are 0."""
    weights = np.asarray(weights, np.float64)
    if not (weights > 0).any():
        return -1
    ids = np.arange(weights.size) if ids is None else ids
    noise = gumbel(words(seed, position, purpose, ids, sample))
    with np.errstate(divide="ignore"):
        return int(
            np.argmax(np.where(weights > 0, np.log(np.maximum(weights, 0)) + noise, -np.inf))
        )


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


def legal_ids(size: int, limit: int, mask: np.ndarray | None) -> np.ndarray:
    """Legality of each target id under a bitmask row (None: unconstrained) and the id bound."""
    ids = np.arange(size)
    legal = ids < limit
    if mask is not None:
        bits = np.asarray(mask).view(np.uint32)
        legal &= (bits[ids // 32] >> (ids % 32).astype(np.uint32) & 1).astype(bool)
    return legal


@dataclass(frozen=True)
class Slot:
    """State of one slot, as the round sees it."""

    n: int
    last: int
    limit: int
    seed: int
    filter: Filter
    verify: int = REJECTION
    epoch: int = 1
    sample: int = 0
    active: bool = True
    stop_ids: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()
    q: tuple[F64, ...] = field(default=(), repr=False)  # over target ids


@dataclass(frozen=True)
class MaskRow:
    """A mask row with its stamp; `more` of a free row: its request has no grammar."""

    state: int
    epoch: int
    position: int
    bits: np.ndarray | None = None
    more: int = 0

    def effective(self, slot: Slot, position: int) -> int:
        """State that counts for `slot` at `position`."""
        if self.epoch != slot.epoch:
            return NOT_READY
        anywhere = self.state == FREE and self.more
        return self.state if anywhere or self.position == position else NOT_READY


@dataclass(frozen=True)
class Outcome:
    """What verification commits."""

    tokens: tuple[int, ...] = ()
    accepted: int = 0
    reason: int = RUNNING


def verify(
    slot: Slot, logits: np.ndarray, masks: list[MaskRow], token_limit: int
) -> tuple[Slot, Outcome]:
    """One round of one slot: logits [K+1, V] of `last` and the drafts, mask rows 0..K."""
    tokens: list[int] = []
    accepted, reason = 0, RUNNING
    for j in range(min(len(slot.drafts), len(logits) - 1) + 1):
        position = slot.n + j + 1
        if position >= slot.limit:
            reason = LENGTH
            break
        state = masks[j].effective(slot, slot.n + j)
        legal = legal_ids(logits.shape[1], token_limit, masks[j].bits if state == READY else None)
        seen = logits[j][legal]
        if state in (FREE, READY):
            if np.isnan(seen).any() or (seen == np.inf).any():
                state = ERROR
            elif not (seen > -np.inf).any():
                state = DEAD_END
        if state not in (FREE, READY):
            if j == 0:
                reason = {DEAD_END: DEAD, ERROR: FAULT}.get(state, RUNNING)
            break
        bonus = j == min(len(slot.drafts), len(logits) - 1)
        d = -1 if bonus else slot.drafts[j]
        if slot.filter.greedy:
            token = int(np.argmax(np.where(legal, logits[j], -np.inf)))
            ok = token == d
        else:
            p = distribution(logits[j], legal, slot.filter)
            if slot.verify == COUPLED or bonus:
                token = draw(p, slot.seed, position, NOISE, sample=slot.sample)
                ok = token == d
            else:
                token, ok = _tested(slot, j, d, p, position)
        tokens.append(token)
        accepted += ok
        if token in slot.stop_ids:
            reason = STOP
        elif position + 1 >= slot.limit:
            reason = LENGTH
        if not ok or reason != RUNNING:
            break
    if not tokens:
        return replace(slot, active=slot.active and reason == RUNNING), Outcome(reason=reason)
    after = replace(
        slot,
        n=slot.n + len(tokens),
        last=tokens[-1],
        drafts=(),
        kinds=(),
        q=(),
        active=reason == RUNNING,
    )
    return after, Outcome(tuple(tokens), accepted, reason)


def _tested(slot: Slot, j: int, d: int, p: F64, position: int) -> tuple[int, bool]:
    """The draft if it is accepted, else the token that replaces it; and whether it was."""
    u = coin(slot.seed, position, slot.sample)
    pd = p[d] if 0 <= d < p.size else 0.0
    if slot.kinds[j] == POINT:
        accepted, left = u < pd, np.where(np.arange(p.size) == d, 0.0, p)
    else:
        qd = slot.q[j][d] if 0 <= d < p.size else 0.0
        accepted, left = qd > 0 and u * qd < pd, np.maximum(p - slot.q[j], 0.0)
    if accepted:
        return d, True
    token = draw(left, slot.seed, position, RESIDUAL, sample=slot.sample)
    if token < 0:
        token = draw(p, slot.seed, position, RESIDUAL, sample=slot.sample)
    return token, False


def draft(
    slot: Slot,
    j: int,
    logits: np.ndarray,
    mask: MaskRow | None,
    token_limit: int,
    d2t: np.ndarray | None,
    vocab_size: int,
) -> Slot:
    """Draft j of one slot (mask None: drafting without masks); unchanged where drafting stops."""
    position = slot.n + j
    if not slot.active or len(slot.drafts) != j - 1 or position >= slot.limit:
        return slot
    if slot.drafts and slot.drafts[-1] in slot.stop_ids:
        return slot
    bits = None
    if mask is not None:
        state = mask.effective(slot, position - 1)
        if state not in (FREE, READY):
            return slot
        bits = mask.bits if state == READY else None
    ids = np.arange(logits.size) if d2t is None else d2t
    legal = np.zeros(logits.size, bool)
    inside = (ids >= 0) & (ids < vocab_size)
    legal[inside] = legal_ids(vocab_size, token_limit, bits)[ids[inside]]
    seen = logits[legal]
    if not (seen > -np.inf).any() or np.isnan(seen).any() or (seen == np.inf).any():
        return slot
    q = np.zeros(vocab_size)
    kind = POINT
    if slot.filter.greedy:
        column = int(np.argmax(np.where(legal, logits, -np.inf)))
    else:
        p = distribution(logits, legal, slot.filter)
        coupled = slot.verify == COUPLED
        purpose = NOISE if coupled else DRAFT
        column = draw(p, slot.seed, position, purpose, ids=ids, sample=slot.sample)
        q[ids[legal]] = p[legal]
        kind = POINT if coupled else DENSE
    return replace(
        slot, drafts=(*slot.drafts, int(ids[column])), kinds=(*slot.kinds, kind), q=(*slot.q, q)
    )
