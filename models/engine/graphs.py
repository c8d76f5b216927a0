"""Construction of an engine's graphs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from graft.models.engine.assembly import Assembly
from graft.models.engine.options import Options
from graft.models.engine.selection import GraphKey
from graft.models.round.loop import LoopGraph
from graft.models.round.round import RoundGraph

__all__ = ["build_graphs", "kind_without_host"]


def kind_without_host(assembly: Assembly) -> str:
    """Return the kind of the graphs for batches that need no grammar steps on the host.

    In an engine that builds no such graphs, these batches run in graphs with such steps, too.
    """
    if assembly.parts.mode.is_lattice_tree:
        return "host"
    if assembly.loop_control is not None:
        return "loop"
    return "device" if assembly.parts.automata is not None else "host"


def build_graphs(assembly: Assembly, options: Options) -> Iterator[tuple[GraphKey, RoundGraph]]:
    """Build the graphs for each batch bucket and draft length, and yield each one with its key.

    Raises
    ------
    OptionError
        If ``generation="graph"`` is not possible.
    """
    budget = assembly.budget
    scratch = assembly.parts.scratch(options.max_batch_size)
    kinds = dict.fromkeys(("host", kind_without_host(assembly)))
    buckets = _batch_buckets(options.max_batch_size)
    for batch, drafts, kind in itertools.product(buckets, budget.lengths, kinds):
        arguments = (
            assembly.parts,
            scratch,
            batch,
            drafts,
            budget.drafts_to_generate(batch, drafts),
        )
        graph: RoundGraph
        if kind == "loop" and assembly.loop_control is not None:
            graph = LoopGraph(*arguments, assembly.loop_control)
        else:
            graph = assembly.round_class(*arguments, has_host_steps=kind == "host")
        yield GraphKey(batch, drafts, kind), graph


def _batch_buckets(max_batch_size: int) -> list[int]:
    """Return the batch sizes for which graphs are built: powers of two, and the maximum."""
    sizes = []
    size = 1
    while size < max_batch_size:
        sizes.append(size)
        size *= 2
    return [*sizes, max_batch_size]
