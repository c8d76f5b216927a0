"""Reference implementation of candidates for drafts and of draft trees.

It is the oracle of the kernels that rank candidates and grow trees (test_draft.py and test_tree.py
in tests/sampling), and of the lattice probe of the guided decoder (grammar/test_guide_trees.py).
The rules of rounds are those of `reference_round`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence

import numpy as np
from reference_round import (
    NOISE,
    Filter,
    FloatArray,
    Slot,
    Tree,
    broken,
    chain,
    distribution,
    gumbel,
    ranking,
    words,
)


def candidates(slot: Slot, j: int, logits: np.ndarray, ids: np.ndarray, token_limit: int) -> list:
    """Return the candidates for draft j, which the grammar tests in this order.

    It is the order in which the target will prefer the ids. Ids that top-k, top-p or min-p remove
    come last. They are candidates too, because the grammar may reject all other ids.
    """
    legal = (ids >= 0) & (ids < token_limit)
    if broken(logits, legal):
        return []
    legal &= logits > -np.inf
    kept = legal
    if not slot.filter.greedy:
        kept = distribution(logits, legal, slot.filter) > 0
    scores = _race_scores(slot, slot.n + j, logits, ids)
    columns = sorted(np.flatnonzero(legal), key=lambda c: (not kept[c], -scores[c], c))
    return [int(ids[c]) for c in columns]


def _race_noise(slot: Slot, position: int, ids: np.ndarray) -> FloatArray:
    """Return the Gumbel variates with which the target samples the token at a position."""
    return gumbel(words(slot.seed, position, NOISE, np.maximum(ids, 0), slot.sample))


def _race_scores(slot: Slot, position: int, logits: np.ndarray, ids: np.ndarray) -> FloatArray:
    """Return the score of each id at a position; the target chooses the id with the greatest."""
    x = logits.astype(np.float64)
    if slot.filter.greedy:
        return x
    temperature = np.float64(np.float32(slot.filter.temperature))
    return x / temperature + _race_noise(slot, position, ids)


def shares(slot: Slot, j: int, logits: np.ndarray, ids: np.ndarray, limit: int) -> dict[int, float]:
    """Return the probability of each id for draft j.

    For sampled requests, it is weighted with the random numbers of the target (`_race_noise`), so
    that the id that the target will sample is likely.
    """
    legal = (ids >= 0) & (ids < limit) & (logits > -np.inf)
    if broken(logits, legal):
        return {}
    if slot.filter.greedy:
        weights = distribution(logits, legal, Filter(1.0))
    else:
        weights = distribution(logits, legal, slot.filter)
        weights = weights * np.exp(_race_noise(slot, slot.n + j, ids))
    weights = weights / weights.sum()
    return dict(zip(ids.tolist(), weights.tolist(), strict=True))


def children(
    slot: Slot,
    position: int,
    logits: np.ndarray,
    ids: np.ndarray,
    token_limit: int,
    legal: Callable[[int], bool] | None,
    max_candidates: int,
    branch: int,
) -> list[tuple[float, int]]:
    """Return (log probability, id) of the children of a node, best first.

    The children are the first `branch` ids that the grammar accepts among the best
    `max_candidates`. Rejected candidates count as impossible. For sampled requests, probabilities
    are weighted with the random numbers of the target (`_race_noise`).
    """
    known = (ids >= 0) & (ids < token_limit)
    if broken(logits, known):
        return []
    scores = _race_scores(slot, position, logits, ids)
    x = np.where(known & (logits > -np.inf), scores, -np.inf)
    relative = x - x.max()
    log_prob = relative - np.log(np.exp(relative).sum())
    smallest = np.log(1e-30)  # kernels treat smaller values as 0
    found = []
    rejected = 0.0
    for c in ranking(log_prob)[:max_candidates]:
        if relative[c] <= smallest or len(found) == branch:
            break
        token = int(ids[c])
        prob = float(np.exp(log_prob[c]))
        if legal is None or legal(token):
            found.append((prob, token))
        else:
            rejected += prob
    left = max(1 - rejected, sum(prob for prob, _ in found))
    return [(float(np.log(prob / left)), token) for prob, token in found]


def grow(
    slot: Slot,
    branch: int,
    levels: int,
    drafts: int,
    capacity: int,
    children_of: Callable[[tuple[int, ...]], list[tuple[float, int]]],
) -> tuple[Tree, list[int], float]:
    """Grow a draft tree level by level.

    The best `branch` nodes of a level are fed to the drafter. The best `drafts` nodes of all levels
    are kept, best first. Of nodes with equal scores, the earlier one is preferred. The parent of a
    kept node is kept, too. The positions of drafts are below `capacity`. `children_of` returns
    (log probability, id) of the children of a node, given its path.

    Return the tree; the number of fed nodes of each level; and the smallest difference of two
    scores. If it is below the rounding error, a kernel may order the nodes differently.
    """

    def score_descending(node: tuple[float, tuple[int, ...]]) -> float:
        return -node[0]

    seen: list[tuple[float, tuple[int, ...]]] = []
    fed: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    num_fed = []
    for level in range(1, levels + 1):
        new: list[tuple[float, tuple[int, ...]]] = []
        for score, path in fed:
            for value, token in children_of(path):
                new.append((score + value, (*path, token)))
        seen += new
        fed = []
        if level < levels and slot.n + level + 1 < slot.limit:
            parents = [node for node in new if node[1][-1] not in slot.stop_ids]
            fed = sorted(parents, key=score_descending)[:branch]
        num_fed.append(len(fed))
    paths = [path for _, path in sorted(seen, key=score_descending)[:drafts]]
    max_drafts = max(capacity - slot.n - 1, 0)
    gaps = np.diff(np.unique([score for score, _ in seen]))
    return tree_of(slot.last, paths[:max_drafts]), num_fed, gaps.min(initial=1)


def grow_given(
    slot: Slot,
    ranks: Collection[tuple[int, ...]],
    capacity: int,
    children_of: Callable[[tuple[int, ...], tuple[int, ...]], list[tuple[float, int]]],
) -> tuple[Tree, list[int], float]:
    """Grow a tree of fixed shape.

    `ranks` has the ranks of the nodes on the path of each draft. `children_of` gets the tokens and
    the ranks of a path. Other parameters and results are those of `grow`.
    """
    found: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}  # tokens of a path by its ranks
    num_fed = [0] * max(map(len, ranks))
    gap = 1.0
    for parent in _by_level({path[:-1] for path in ranks}):
        path = found.get(parent)
        if path is None:
            continue
        if path and (path[-1] in slot.stop_ids or slot.n + len(path) + 1 >= slot.limit):
            continue
        children = children_of(path, parent)
        num_fed[len(parent)] += 1
        scores = np.unique([value for value, _ in children])
        gap = min([gap, *np.diff(scores)])
        for rank, (_, token) in enumerate(children):
            if (*parent, rank) in ranks:
                found[*parent, rank] = (*path, token)
    paths = [found[draft] for draft in _by_level(found) if draft]
    max_drafts = max(capacity - slot.n - 1, 0)
    return tree_of(slot.last, paths[:max_drafts]), num_fed, gap


def _by_level(paths: Collection[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return paths of ranks ordered by level, then by rank."""
    return sorted(paths, key=lambda path: (len(path), path))


def tree_of(last: int, paths: list[tuple[int, ...]]) -> Tree:
    """Return the tree whose nodes after node 0 are the ends of `paths`, in this order."""
    node_of: dict[tuple[int, ...], int] = {(): 0}
    tokens = [last]
    parents = [-1]
    for node, path in enumerate(paths, 1):
        node_of[path] = node
    for path in paths:
        tokens.append(path[-1])
        parents.append(node_of[path[:-1]])
    return Tree(tuple(tokens), tuple(parents))


def legal_tree(
    last: int,
    levels: Sequence[Sequence[tuple[int, float]]],
    branch: int,
    drafts: int,
    tests: int,
    legal: Callable[[tuple[int, ...], int], bool],
    ended: Callable[[tuple[int, ...]], bool],
) -> Tree:
    """Return the tree of the most likely legal drafts that `tests` grammar tests find in a lattice.

    A lattice has candidates for each level, with probabilities that do not depend on the drafts of
    other levels: `levels` has (id, probability) of the candidates of each level. A node has at most
    `branch` children, and none if the path to it has ended.

    The probability of a node is the product of the probabilities on its path. Each of them is
    relative to the candidates that the grammar has not rejected after the same parent. The most
    likely candidate of all nodes is tested next. If several are equal, the candidate of the earlier
    node is tested first.
    """
    tree = chain(last)
    score = [1.0]
    left = [1.0]
    waiting = []

    def wait(node: int, c: int) -> None:
        path = tree.path(node)
        if len(path) >= len(levels) or c >= len(levels[len(path)]):
            return
        if tree.parent.count(node) >= branch or ended(path):
            return
        _, share = levels[len(path)][c]
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
