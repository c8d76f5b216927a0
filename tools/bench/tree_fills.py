"""Mask rows for a tree of drafts: graft's worker beside XGrammar's ``traverse_draft_tree``.

One slot in the middle of real documents; at every token a tree of drafts that are mostly legal.
Both sides fill the row of every node that can be reached, by accepting and rolling back, one thread
each, in turns; graft is timed by its worker's own clock. Usage::

    python -m graft.tools.bench.tree_fills ../shared/data/maskbench \\
        --tokenizer ../shared/data/tokenizers/deepseek-128k.json.gz

Any machine will do (``GRAFT_DEVICE=soft``): it is work of a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from graft.cudagraph.device import Device, open_device
from graft.cudagraph.errors import GraftError, OptionError
from graft.cudagraph.exchange import Exchange
from graft.cudagraph.graph import Graph
from graft.grammar import GuidedDecoder, GuidedRequest, Matcher, make_backend
from graft.tools.bench.data import add_arguments, load_tokenizer
from graft.tools.bench.grammar_child import XGrammar
from graft.tools.bench.rounds import Document, documents, placing
from graft.tools.report import program


def grow(matcher: Matcher, future: Sequence[int], nodes: int, depth: int,
         rng: np.random.Generator) -> tuple[list[int], list[int], int]:  # fmt: skip
    """Ids and parents of a tree: the document's next tokens, legal ids, and some that are not; and
    how many of its nodes can be reached."""
    ids, parents, reached = list[int](), list[int](), 0
    paths: list[list[int]] = [[]]
    row = np.zeros(matcher.compiled.backend.vocabulary.words, np.int32)
    size, stops = matcher.size, set(matcher.stop_ids)
    while len(ids) < nodes:
        parent = int(rng.choice([i for i, path in enumerate(paths) if len(path) < depth][-12:]))
        path = paths[parent]
        known = [matcher.accept(t) for t in path]
        if all(known) and not matcher.is_terminated() and rng.random() < 0.85:
            matcher.fill(row)
            legal = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:size])
            on_way = path == list(future[: len(path)]) and len(path) < len(future)
            token = future[len(path)] if on_way else int(rng.choice(legal))
        else:
            token = int(rng.integers(size))
        taken = any(p == parent and t == token for p, t in zip(parents, ids, strict=True))
        kept = not taken and token not in stops
        known.append(kept and all(known) and matcher.accept(token))
        matcher.rollback(sum(known))
        if not kept:
            continue
        reached += known[-1]
        ids.append(int(token))
        parents.append(parent)
        paths.append([*path, int(token)])
    return ids, parents, reached


class Graft:
    """The open step of a replayed graph, whose kernels write what was recorded."""

    def __init__(self, device: Device, backend: Any, nodes: int):
        self._nodes, self._replay = nodes, 0
        exchange = Exchange(device, 1, nodes, backend.vocabulary.size)
        self._decoder = GuidedDecoder(exchange, masked_drafts=False, threads=1)
        self._stream, graph = device.stream("trees"), Graph(device, "tree")
        lane = graph.lane("grammar")
        self._decoder.add(lane, self._decoder.open_work(), name="open")
        self._staged = [placing(device, lane, exchange, part) for part in ("committed", "drafted")]
        self._decoder.add(lane, self._decoder.commit_work(), name="commit")
        self._run = graph.instantiate()

    def begin(self, document: Document, start: int) -> None:
        matcher = document.compiled.matcher()
        for token in document.tokens[:start]:
            matcher.accept(token)
        self._request = GuidedRequest(0, self._replay + 1, matcher, start)

    def play(self, token: int, ids: Sequence[int], parents: Sequence[int]) -> tuple[int, int]:
        """Fill what the last call drafted; then commit a token and draft behind it.

        Returns
        -------
        tuple
            Nanoseconds and fills of the rows that were filled.
        """
        self._replay += 1
        (committed, _), (drafted, _) = self._staged
        committed[0, :3] = self._replay, 1, token
        drafted[0, : 2 + len(ids)] = self._replay, len(ids), *ids
        drafted[0, 2 + self._nodes :][: len(ids)] = parents
        for host, memory in self._staged:
            memory.copy_from(host)
        self._decoder.publish(self._replay, [self._request])
        before = self._decoder.counters()
        self._run.launch(self._stream)
        self._run.synchronize(60.0)
        self._decoder.retire(self._replay)
        after = self._decoder.counters()
        if after["desyncs"] or after["errors"]:
            raise GraftError(f"the worker failed: {self._decoder.error(0)} {after}")
        # The commit fills row 0; the open step the others.
        fills = after["fills"] - before["fills"] - 1
        return after["open_ns"] - before["open_ns"], fills


def links(parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """First child and next sibling of every node, -1 for none; node 0 is the root."""
    child, sibling = (np.full(len(parents) + 1, -1, np.int64) for _ in range(2))
    for node in range(len(parents), 0, -1):
        sibling[node], child[parents[node - 1]] = child[parents[node - 1]], node
    return child, sibling


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds and fills of both sides."""
    tokenizer, vocabulary = load_tokenizer(options.tokenizer, options.stop_token)
    backend, rng = make_backend("xgrammar", vocabulary), np.random.default_rng(0)
    stock = XGrammar(vocabulary, tokenizer)
    found = documents(options.folder, backend, stock, "xgrammar", tokenizer, options.documents,
                      options.places + 8, rng)  # fmt: skip
    graft = Graft(open_device(), backend, options.nodes)
    rows = np.zeros((options.nodes + 1, vocabulary.words), np.int32)
    took: dict[str, list[int]] = {"graft": [], "stock": []}
    fills = {"graft": 0, "stock": 0, "reached": 0}
    for document in tqdm(found, unit="document", disable=None):
        start = int(rng.integers(1, len(document.tokens) - options.places))
        ours, theirs = document.compiled.matcher(), document.stock()
        for token in document.tokens[:start]:
            ours.accept(token)
            stock.accept(theirs, token)
        graft.begin(document, start)
        for at in range(start, start + options.places):
            token, future = document.tokens[at], document.tokens[at + 1 : at + 9]
            ours.accept(token)
            ids, parents, reached = grow(ours, future, options.nodes, options.depth, rng)
            filled = graft.play(token, ids, parents)  # the tree of the token before
            if at > start:
                took["graft"].append(filled[0])
                fills["graft"] += filled[1]
            stock.accept(theirs, token)
            child, sibling = links(parents)
            tokens = np.array([token, *ids], np.int64)
            rows[:] = -1
            begin = time.perf_counter_ns()
            theirs.traverse_draft_tree(child, sibling, tokens, rows, -1.0, None)
            spent = time.perf_counter_ns() - begin
            if at < start + options.places - 1:
                took["stock"].append(spent)
                fills["stock"] += int((rows[1:] != -1).any(1).sum())
                fills["reached"] += reached
    figures = {side: {"p50": float(np.median(ns)) / 1e6, "p99": float(np.quantile(ns, 0.99)) / 1e6,
                      "sum": sum(ns) / 1e6} for side, ns in took.items()}  # fmt: skip
    return {"documents": len(found), "trees": len(took["stock"]), "nodes": options.nodes,
            "ms": figures, "rows": fills,
            "graft_over_stock": {key: figures["graft"][key] / figures["stock"][key]
                                 for key in figures["graft"]}}  # fmt: skip


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; refusals are one line on stderr and exit status 2."""
    parser = argparse.ArgumentParser(prog="python -m graft.tools.bench.tree_fills",
                                     description=(__doc__ or "").split("\n\n")[0])
    add_arguments(parser)
    for flag, default in (("nodes", 63), ("depth", 8), ("places", 12), ("documents", 60)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    options = parser.parse_args(arguments)
    if min(value for value in vars(options).values() if isinstance(value, int)) < 1:
        raise OptionError("sizes and counts must be at least 1")
    print(json.dumps(measure(options), indent=1))


if __name__ == "__main__":
    sys.exit(main())
