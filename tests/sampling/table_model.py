"""A model with eight tokens, whose logits and legal tokens depend only on the last two tokens.

`generate` runs the sampling kernels round by round. Host code takes the place of the model, the
drafter and the grammar. `pair_distributions` computes the exact distribution of pairs of
neighbouring tokens, with which tests compare the generated tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import reference_round as ref
from sampling_round import TableRound

from graft.cudagraph.device import Device, Stream
from graft.sampling.mode import TREE_CANDIDATES, DraftMode
from graft.sampling.tree import TreePlan, TreeSampler

V = 8
PLAIN = ref.Filter(1.0)
COLD = ref.Filter(0.6)
MIXED = ref.Filter(1.2, top_k=5, top_p=0.85, min_p=0.05)
NARROW = ref.Filter(1.0, top_k=3)
NUCLEUS = ref.Filter(1.1, top_p=0.85)
START = (0, 1)  # the prompt's last two tokens
FIRST = 5  # position of the last prompt token
EPOCH = 3  # of all requests
EVERY_SLOT = slice(None)
END = V  # symbol of positions after a stop id


@dataclass(frozen=True)
class Table:
    """Logits and legal tokens after each pair of tokens.

    Attributes
    ----------
    target
        float32 [8, 8, 8], logits of the target.
    drafter
        float32 [8, 8, Vd], logits of the drafter.
    legal
        bool [8, 8, 8], whether the grammar allows a token.
    d2t
        Target id of each drafter column; None if columns are target ids.
    """

    target: np.ndarray
    drafter: np.ndarray
    legal: np.ndarray
    d2t: np.ndarray | None = None


def make_table(seed: int, *, d2t: np.ndarray | None = None) -> Table:
    """Return random tables in which the drafter often prefers other tokens than the target."""
    rng = np.random.default_rng(seed)
    target = rng.normal(0, 1.5, (V, V, V))
    full = -0.6 * target + rng.normal(0, 1.0, (V, V, V))
    legal = rng.random((V, V, V)) < 0.6
    legal[..., 2] |= ~legal.any(axis=-1)
    drafter = full if d2t is None else full[..., d2t]
    return Table(target.astype(np.float32), drafter.astype(np.float32), legal, d2t)


def sharp_table(seed: int) -> Table:
    """Return tables of four tokens with very different probabilities."""
    rng = np.random.default_rng(seed)
    legal = np.arange(V) < 4
    both = np.full((2, V, V, V), -30.0, np.float32)
    both[..., legal] = np.log(rng.dirichlet([0.3] * 4, (2, V, V)))
    return Table(both[0], both[1], np.broadcast_to(legal, (V, V, V)))


@dataclass(frozen=True)
class Case:
    """A combination of settings."""

    draft_length: int = 2
    filter: ref.Filter = PLAIN
    verify: int = ref.REJECTION
    masked: bool = True
    pruned: bool = False
    point: bool = False  # drafts proposed by the host, like those of an n-gram drafter
    stop_ids: tuple[int, ...] = ()
    length: int = 5
    forced: bool = False  # some rows force tokens
    late: bool = False  # mask rows after some prefixes are not ready during verification
    probe: bool = False  # a draft is the first legal candidate; if there is none, it is sampled
    sharp: bool = False  # only four tokens; drafter and target differ much
    short: bool = False  # the number of drafts depends on how many were accepted last
    placed: bool = False  # a round has forward rows for only an eighth of all drafts
    tree: tuple[tuple[int, ...], ...] = ()  # paths of a fixed tree
    peaked: bool = False  # a drafter with very low entropy

    def __str__(self) -> str:
        parts = {**vars(self), **vars(self.filter), "filter": 0}
        return "-".join(f"{name}={value}" for name, value in parts.items() if value)


TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))

# For any two settings, each pair of their values occurs in at least one of these cases.
COVERING = [
    Case(0, PLAIN),
    Case(0, MIXED, stop_ids=(6,)),
    Case(1, PLAIN, masked=False),
    Case(3, PLAIN, masked=False),
    Case(3, PLAIN, masked=True, pruned=True),
    Case(3, MIXED, masked=False, pruned=True),
    Case(2, NUCLEUS, masked=True, stop_ids=(3, 6)),
    Case(2, NARROW, masked=False),
    Case(1, COLD, masked=True, pruned=True, stop_ids=(7,)),
    Case(3, COLD, masked=False, late=True),
    Case(3, NUCLEUS, point=True, masked=False),
    Case(2, MIXED, point=True, masked=False, late=True, stop_ids=(6,)),
    Case(2, PLAIN, masked=True, late=True),
    Case(3, PLAIN, probe=True, pruned=True),
    Case(3, PLAIN, forced=True),
    Case(3, PLAIN, verify=ref.PER_TOKEN, masked=False),
    Case(4, PLAIN, masked=False, sharp=True),
    Case(4, PLAIN, masked=False, sharp=True, short=True),
    Case(4, PLAIN, masked=False, sharp=True, placed=True),
    Case(3, PLAIN, stop_ids=(3, 6), placed=True),
    Case(6, PLAIN, masked=False, sharp=True, tree=TREE),
    Case(6, MIXED, verify=ref.COUPLED, pruned=True, late=True, stop_ids=(6,), tree=TREE),
    Case(6, PLAIN, verify=ref.COUPLED, tree=TREE),
    Case(6, PLAIN, tree=TREE, peaked=True),
]

PROBED = 2  # number of candidates per draft; with so few, often no candidate is legal
PRUNED = np.array([0, 2, 3, 6, 7], np.int32)


def table_of(case: Case) -> Table:
    """Return the model of a case."""
    table = sharp_table(5) if case.sharp else make_table(17, d2t=PRUNED if case.pruned else None)
    return replace(table, drafter=table.drafter * np.float32(25)) if case.peaked else table


def run_case(device: Device, stream: Stream, case: Case, samples: int, seed: int) -> np.ndarray:
    """Return tokens [requests, length], about `samples` in total; `END` after a stop id."""
    table = table_of(case)
    slots = 1024
    r = TableRound(
        device,
        stream,
        slots=slots,
        vocab=V,
        d2t=table.d2t,
        places=slots * case.draft_length // 8 if case.placed else None,
        mode=_mode(case),
    )
    waves = max(1, -(-samples // (case.length * slots)))
    first = range(seed * 10**6, seed * 10**6 + waves * slots, slots)
    return np.concatenate([generate(r, table, case, each) for each in first])


def _mode(case: Case) -> DraftMode:
    """Return the draft mode of a case."""
    if not case.tree:
        masking = "fill" if case.masked else "none"
        if case.probe:
            return DraftMode.chain(case.draft_length, "probe", PROBED)
        return DraftMode.chain(case.draft_length, masking)
    plan = TreePlan.of(case.tree)
    return DraftMode(
        drafts=case.draft_length,
        levels=plan.levels,
        branch=plan.branch,
        masking="probe" if case.masked else "none",
        candidates=TREE_CANDIDATES if case.masked else 0,
        paths=plan.paths,
    )


def generate(r: TableRound, table: Table, case: Case, first_seed: int) -> np.ndarray:
    """Run one request per slot from the prompt to its end; return the tokens [slots, length]."""
    every = np.arange(r.slots)
    tree = TreeSampler(r.sampler.arrays) if case.tree else None
    _join_all(r, case, first_seed)
    # Two tokens of the prompt, then the output.
    history = np.full((r.slots, case.length + 2 + r.width), END)
    history[:, :2] = START
    accepted = np.zeros(r.slots, int)

    def known() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the state of each slot, its number of output tokens and its last two tokens."""
        state = r.state.to_host()
        done = state["n"] - FIRST
        root = np.stack([history[every, done], history[every, done + 1]], axis=1)
        root[state["active"] == 0] = 0
        return state, done, root

    while True:
        state, done, root = known()
        if not state["active"].any():
            return history[:, 2 : 2 + case.length]
        pairs = _fill_rows(r, table, case, state, root)
        if case.short:
            state["draft_len"] = np.maximum(state["draft_len"] - accepted, 0)
            r.state.copy_from(state)
        out = r.verify(table.target[pairs[..., 0], pairs[..., 1]])
        accepted = out["accepted"]
        for i in range(r.width):
            new = i < out["count"]
            history[every[new], (done + 2 + i)[new]] = out["tokens"][new, i]
        state, _, root = known()
        if tree is not None:
            _draft_tree(r, table, case, tree, root)
        elif r.draft_length:
            _draft_chain(r, table, case, state["n"], root)


def _draft_chain(r: TableRound, table: Table, case: Case, n: np.ndarray, pair: np.ndarray) -> None:
    """Generate drafts after the last two tokens of every slot, one after the other."""
    proposal = np.zeros((r.slots, r.draft_length), np.int32)
    for j in range(1, r.draft_length + 1):
        if case.probe:
            r.candidates(j, table.drafter[pair[:, 0], pair[:, 1]])
            _answer(r, table, pair, j)
        forced = _forced(pair) if case.forced else np.full(r.slots, -1)
        legal = table.legal[pair[:, 0], pair[:, 1]]
        row = ref.MaskRow(ref.READY, EPOCH, n + j - 1, legal, 1 + forced)
        r.write_mask(EVERY_SLOT, j - 1, row)
        if case.point:
            token = proposal[:, j - 1] = _rule(pair)
        else:
            r.draft(j, table.drafter[pair[:, 0], pair[:, 1]])
            state = r.state.to_host()
            token = np.where(state["draft_len"] >= j, state["drafts"][:, j - 1], 0)
        pair = np.stack([pair[:, 1], token], axis=1)
    if case.point:
        r.add_drafts(proposal)


def _draft_tree(
    r: TableRound, table: Table, case: Case, tree: TreeSampler, root: np.ndarray
) -> None:
    """Grow trees of the case's shape."""
    branch, levels, _ = TreePlan.of(case.tree)
    for level in range(1, levels + 1):
        first = max((level - 2) * branch + 1, 0)
        fed = branch if level > 1 else 1
        pairs, _ = _pairs(r.state.to_host(), root, first + fed - 1, first + fed - 1)
        behind = pairs[:, first : first + fed]
        logits = table.drafter[behind[..., 0], behind[..., 1]].reshape(r.slots * fed, -1)
        up = r.device.from_host(logits, "float32")
        if case.masked:
            tree.candidates(r.lane, up, r.row_slot, level)
            r.stream.synchronize()
            _answer_trees(r, table, behind, level)
        tree.draft(r.lane, up, r.row_slot, level)
    r.stream.synchronize()


def _fill_rows(
    r: TableRound, table: Table, case: Case, state: np.ndarray, root: np.ndarray
) -> np.ndarray:
    """Fill the mask rows of every slot's drafts; return the last two tokens before each row.

    Rows after an illegal draft are not filled.
    """
    every = np.arange(r.slots)
    there = state["draft_len"]
    pairs, depth = _pairs(state, root, r.draft_length, there)
    exists = np.ones((r.slots, r.width), bool)
    for j in range(r.width):
        if j > 0:
            parent = np.where(j <= there, state["parent"][:, j - 1], 0)
            above = pairs[every, parent]
            legal = table.legal[above[:, 0], above[:, 1], pairs[:, j, 1]]
            exists[:, j] = exists[every, parent] & (j <= there) & legal
        ready = exists[:, j].copy()
        if case.late and j > 0:  # the prefix alone decides whether a row is late
            ready &= (pairs[:, j].sum(axis=1) + state["n"]) % 3 != 0
        row_state: Any = np.where(ready, ref.READY, ref.NOT_READY)
        legal = table.legal[pairs[:, j, 0], pairs[:, j, 1]]
        row = ref.MaskRow(row_state, EPOCH, state["n"] + depth[:, j], legal)
        r.write_mask(EVERY_SLOT, j, row)
    return pairs


def _pairs(
    state: np.ndarray, root: np.ndarray, drafts: int, there: object
) -> tuple[np.ndarray, np.ndarray]:
    """Return the last two tokens and the depth of every row of the slots' trees.

    Missing rows are treated as children of the root.
    """
    every = np.arange(len(root))
    pairs = np.zeros((len(root), drafts + 1, 2), int)
    depth = np.zeros((len(root), drafts + 1), int)
    pairs[:, 0] = root
    for j in range(1, drafts + 1):
        real = (np.asarray(there) >= j) & (state["drafts"][:, j - 1] >= 0)
        parent = np.where(real, state["parent"][:, j - 1], 0)
        pairs[:, j, 0] = pairs[every, parent, 1]
        pairs[:, j, 1] = np.where(real, state["drafts"][:, j - 1], 0)
        depth[:, j] = depth[every, parent] + 1
    return pairs, depth


def _answer_trees(r: TableRound, table: Table, behind: np.ndarray, level: int) -> None:
    """Write for each candidate whether it is legal, in place of the grammar."""
    fed = behind.shape[1]
    ids = r.exchange.candidates[:, 3 : 3 + fed * TREE_CANDIDATES].reshape(r.slots, fed, -1)
    legal = table.legal[behind[..., 0], behind[..., 1]]
    known = (ids >= 0) & (np.cumsum(ids < 0, axis=-1) == 0) & (ids < V)
    taken = np.take_along_axis(legal, np.where(known, ids, 0), axis=-1) & known
    r.exchange.legal[:, :fed] = (taken << np.arange(TREE_CANDIDATES)).sum(axis=-1)
    r.exchange.answer[:] = (r.replay, level, fed)


def _join_all(r: TableRound, case: Case, first_seed: int) -> None:
    """Join every slot with the same request and different seeds."""
    limit = FIRST + 1 + case.length
    request = ref.Slot(
        n=FIRST,
        tree=ref.chain(START[1]),
        limit=limit,
        filter=case.filter,
        verify=case.verify,
        epoch=EPOCH,
        stop_ids=case.stop_ids,
    )
    r.put(0, request, capacity=limit + case.draft_length)
    state = r.state.to_host()
    state[:] = state[0]
    state["seed"] = np.arange(first_seed, first_seed + r.slots, dtype=np.uint64)
    r.state.copy_from(state)


def _rule(pair: np.ndarray) -> np.ndarray:
    """Return a token that depends on the last two tokens. The token may be illegal."""
    return (3 * pair[:, 0] + pair[:, 1] + 2) % V


def _forced(pair: np.ndarray) -> np.ndarray:
    """Return the token that a mask row forces, or -1 if the row forces no token."""
    return np.where((pair[:, 0] + 2 * pair[:, 1]) % 3 == 0, -1, _rule(pair))


def _answer(r: TableRound, table: Table, pair: np.ndarray, j: int) -> None:
    """Write the index of the first legal candidate, or -1, in place of the grammar."""
    records = r.exchange.candidates
    answers = r.exchange.answer
    for slot in range(r.slots):
        replay, draft, count = records[slot, :3].tolist()
        if (replay, draft) == (r.replay, j):
            legal = table.legal[pair[slot, 0], pair[slot, 1]]
            found = [id for id in records[slot, 3 : 3 + count].tolist() if legal[id]]
            answers[slot] = (replay, j, found[0] if found else -1)


def pair_distributions(table: Table, case: Case) -> list[np.ndarray]:
    """Return the exact joint distribution [9, 9] of tokens (t, t + 1) for each t.

    Index 8 is `END`.
    """
    following = np.zeros((V + 1, V + 1, V + 1))
    following[..., END] = 1.0
    for a in range(V):
        for b in range(V):
            if b not in case.stop_ids:
                p = ref.distribution(table.target[a, b], table.legal[a, b], case.filter)
                following[a, b] = [*p, 0.0]
    state = np.zeros((V + 1, V + 1))
    state[START] = 1.0
    state = np.einsum("ab,abc->bc", state, following)  # (prompt, token 0)
    distributions = []
    for _ in range(case.length - 1):
        state = np.einsum("ab,abc->bc", state, following)
        distributions.append(state)
    return distributions


def chi_square_p(observed: np.ndarray, expected_share: np.ndarray) -> float:
    """Return the p-value of the chi-square test of counts; 0 if a cell of probability 0 occurred.

    Cells with an expected count below five are pooled.
    """
    observed = observed.ravel()
    expected_share = expected_share.ravel()
    if observed[expected_share <= 0].any():
        return 0.0
    expected = expected_share * observed.sum()
    big = expected >= 5
    seen = np.append(observed[big], observed[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    if wanted[-1] < 1:
        seen = seen[:-1]
        wanted = wanted[:-1]
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    return chi_square_tail(float(statistic), max(len(wanted) - 1, 0))


def chi_square_tail(x: float, dof: int) -> float:
    """Return P(chi-square with `dof` degrees of freedom > x)."""
    if dof < 3:
        return (1.0, math.erfc(math.sqrt(x / 2)), math.exp(-x / 2))[dof]
    half = math.log(max(x, 1e-300) / 2)
    term = math.exp((dof / 2 - 1) * half - x / 2 - math.lgamma(dof / 2))
    return min(1.0, chi_square_tail(x, dof - 2) + term)


def smallest_p(tokens: np.ndarray, table: Table, case: Case) -> float:
    """Return the Bonferroni-corrected smallest p-value over pairs of neighbouring positions."""
    distributions = pair_distributions(table, case)
    values = []
    for t, expected_share in enumerate(distributions):
        counts = np.zeros((V + 1, V + 1))
        np.add.at(counts, (tokens[:, t], tokens[:, t + 1]), 1)
        values.append(chi_square_p(counts, expected_share))
    return min(1.0, min(values) * len(values))


def wrong_twice(
    device: Device, stream: Stream, case: Case, samples: int
) -> tuple[bool, list[float]]:
    """Return whether a case fails at p < 0.001 with each of two sets of seeds, and the p-values."""
    table = table_of(case)
    values: list[float] = []
    for seed in (1, 2):
        values.append(smallest_p(run_case(device, stream, case, samples, seed), table, case))
        if values[-1] >= 1e-3:
            return False, values
    return True, values
