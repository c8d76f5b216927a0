"""Creates the graphs, scheduler and migrator of an engine from its `Assembly`."""

from __future__ import annotations

import itertools
from pathlib import Path

from graft.cudagraph.device import Device
from graft.cudagraph.lanes import StreamLane
from graft.models.drafters import DrafterChoice
from graft.models.engine.assembly import Assembly
from graft.models.engine.interrupt import Shield
from graft.models.engine.loop_replays import LoopReplays
from graft.models.engine.migrate import Migrator, engine_properties
from graft.models.engine.options import Options
from graft.models.engine.promotion import Promotion
from graft.models.engine.replay import Replays
from graft.models.engine.scheduler import Scheduler
from graft.models.engine.selection import GraphKey, GraphSelector
from graft.models.engine.slots import SlotManager
from graft.models.engine.stats import EngineStats
from graft.models.round.loop import LoopGraph
from graft.models.round.prefill import PrefillScheduler
from graft.models.round.round import RoundGraph

__all__ = ["build_graphs", "make_migrator", "make_replays", "make_scheduler"]

#: Maximum number of rounds of a generation loop with ``draft_length="auto"``. The draft length is
#: chosen for each loop.
ROUNDS_PER_LENGTH = 32


def make_replays(assembly: Assembly) -> Replays:
    """Create the object that launches graphs and reads their results."""
    arguments = (assembly.resources, assembly.stream, assembly.budget)
    if assembly.loop_control is None:
        return Replays(*arguments)
    return LoopReplays(*arguments, assembly.loop_control)


def make_migrator(
    assembly: Assembly, device: Device, options: Options, model: Path, drafter: DrafterChoice | None
) -> Migrator:
    """Create the object that transfers requests between engines."""
    resources = assembly.resources
    properties = engine_properties(
        device, options, model, drafter, resources.drafter, resources.target.config
    )
    lane = StreamLane(assembly.stream)
    return Migrator(device, lane, assembly.caches, assembly.prefixes, properties)


def make_scheduler(
    assembly: Assembly,
    options: Options,
    replays: Replays,
    graphs: dict[GraphKey, RoundGraph],
    stats: EngineStats,
) -> Scheduler:
    """Create the scheduler with its slot manager and graph selector.

    `graphs` is empty at first; `build_graphs` adds the graphs.
    """
    resources = assembly.resources
    overlap = options.internal.overlap and options.internal.composition == "one"
    max_in_flight = 2 if overlap else 1
    prefill_rows = options.prefill_rows
    lane = StreamLane(assembly.stream)
    promotion = Promotion(resources.exchange, resources.automata, lane)
    selector = GraphSelector(
        graphs,
        promotion,
        kind_without_host=_kind_without_host(assembly),
        max_loop_rounds=None if len(assembly.budget.lengths) == 1 else ROUNDS_PER_LENGTH,
        serves_all=resources.mode.is_lattice_tree,
    )
    slots = SlotManager(
        options.slots,
        options.max_batch_size,
        caches=assembly.caches,
        prefix_cache=assembly.prefixes,
        prefill=assembly.prefill,
        slot_state=resources.state,
        lane=lane,
        prefill_scheduler=PrefillScheduler(None if prefill_rows == "auto" else int(prefill_rows)),
        promotion=promotion,
        positions_ahead=(max_in_flight + 1) * resources.width,
        slack_positions=options.slack,
    )
    return Scheduler(
        replays,
        slots,
        selector,
        stats,
        assembly.budget,
        max_in_flight=max_in_flight,
        verify=options.verify,
        drafts_from_logits=resources.mode.levels > 0,
    )


def build_graphs(
    assembly: Assembly,
    options: Options,
    scheduler: Scheduler,
    graphs: dict[GraphKey, RoundGraph],
    shield: Shield,
) -> None:
    """Build the graphs for each batch bucket and draft length, and run them without requests.

    The first replay of a graph makes the driver load its kernels, so that no request has to wait
    for this. From the times of the other replays, `DraftBudget` learns the cost of each draft
    length. Prefill chunks without requests are run too, to load their kernels and to measure their
    times. `shield` defers Ctrl-C: KeyboardInterrupt is raised after the current graph is built, or
    while this function waits for a replay.

    Raises
    ------
    OptionError
        If ``generation="graph"`` is combined with a drafter that runs on the host.
    """
    budget = assembly.budget
    scratch = assembly.resources.scratch(options.max_batch_size)
    kinds = dict.fromkeys(("host", _kind_without_host(assembly)))
    buckets = _batch_buckets(options.max_batch_size)
    replays = scheduler.replays
    stats = EngineStats()
    for batch, drafts, kind in itertools.product(buckets, budget.lengths, kinds):
        max_new_drafts = budget.drafts_to_generate(batch, drafts)
        arguments = (assembly.resources, scratch, batch, drafts, max_new_drafts)
        graph: RoundGraph
        if kind == "loop" and assembly.loop_control is not None:
            graph = LoopGraph(*arguments, assembly.loop_control)
        else:
            graph = assembly.round_class(*arguments, has_host_steps=kind == "host")
        graphs[GraphKey(batch, drafts, kind)] = graph
        shield.check()
        for _ in range(1 if len(budget.lengths) == 1 else 3):
            replays.launch(graph, [], [])
            replays.wait(stats, shield)
            replays.finish()
    chunks = assembly.prefill.warm(StreamLane(assembly.stream))
    replays.wait_idle(stats)
    shield.check()
    for chunk in chunks:
        scheduler.slots.prefill_scheduler.record_time(chunk.rows, chunk.elapsed_s())


def _kind_without_host(assembly: Assembly) -> str:
    """Return the `GraphKey.kind` of the graphs for batches without grammar steps on the host.

    If the engine builds no separate graphs for such batches, the result is "host": they run in the
    graphs that have grammar steps on the host.
    """
    if assembly.resources.mode.is_lattice_tree:
        return "host"
    if assembly.loop_control is not None:
        return "loop"
    return "device" if assembly.resources.automata is not None else "host"


def _batch_buckets(max_batch_size: int) -> list[int]:
    """Return the batch sizes for which graphs are built: powers of two, and the maximum."""
    sizes = []
    size = 1
    while size < max_batch_size:
        sizes.append(size)
        size *= 2
    return [*sizes, max_batch_size]
