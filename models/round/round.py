"""One round of guided speculative decoding as one CUDA graph.

The graph has two lanes, in-order sequences of nodes. The model lane runs kernels, and the grammar
lane runs the host functions of the grammar. The lanes synchronize at marks: one lane records a
mark, and the other lane waits for it. ``^`` shows where the model lane waits for the grammar lane,
here for the mask rows, ``[masks]``::

    model    begin - target forward - [masks] - verify - draft ...
    grammar  open ----------------------^          `- commit ...

``begin`` assigns slots to batch rows, and forward rows to drafts. ``open`` fills the mask rows that
verification needs and that are still missing, concurrently with the target forward pass. If mask
rows were filled while drafting, only the row after the last draft is missing; otherwise all rows
are. If the round has fewer forward rows than there may be drafts, ``begin`` cuts some drafts, and
``open`` waits for ``begin``. `graft.models.round.masking` describes the nodes after verification.

A *replay* is one launch of the graph; replays are numbered from 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from graft.cudagraph.device import Device, Stream
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.driver.pinned import PinnedSlots, Ring
from graft.cudagraph.graph.graph import Graph, GraphExec, GraphLane, GraphMark
from graft.grammar.automaton.device import DeviceAutomata
from graft.grammar.decoder import GuidedDecoder
from graft.models.drafters.base import Drafter
from graft.models.drafters.feed import Feed, RoundScratch
from graft.models.errors import DrafterError
from graft.models.llm.llama import LlamaModel
from graft.models.round.grammar_steps import GrammarSteps
from graft.models.round.masking import DraftMasking
from graft.models.round.timing import Part, Stamps, timeline_args
from graft.sampling.chain import ChainSampler
from graft.sampling.exchange import Exchange
from graft.sampling.mode import DraftMode
from graft.sampling.sampler import Sampler
from graft.sampling.state import SlotState
from graft.sampling.tree import TreeSampler

__all__ = ["ROUND_KERNELS", "RoundGraph", "RoundResources"]

_THREADS = 128
ROUND_KERNELS = Path(__file__).parent / "kernels" / "round.cu"


@dataclass(frozen=True)
class RoundResources:
    """Resources that all graphs of an engine share.

    Attributes
    ----------
    device
        Device of the engine.
    target
        Target model.
    drafter
        Drafter; None decodes without speculation.
    mode
        How drafts are generated and masked.
    masking
        Subclass of `DraftMasking` for `mode`.
    sampler
        Samples target tokens, verifies drafts, and samples the drafts of a chain.
    tree
        Samples draft trees level by level; None if `mode` has no such trees.
    state
        State of all slots.
    decoder
        Creates the grammar steps that run on the host.
    automata
        Adds the kernels that do grammar steps; None: all grammar steps run on the host.
    exchange
        Memory shared by kernels, grammar worker and host.
    inputs, outputs
        Ring through which the host passes the slot of each batch row, and ring through which the
        device returns the results. Each replay uses one entry.
    timeline
        Time stamps of recent replays, see `make_timeline`.
    replay
        int32 [1] on the device, number of the current replay.
    depth
        Maximum number of drafts that a round can accept, which is the depth of the draft tree.
    programmatic
        Whether kernels use programmatic dependent launch.
    every_part
        Whether every part of a round is timed, or only the whole round.
    """

    device: Device
    target: LlamaModel
    drafter: Drafter | None
    mode: DraftMode
    masking: type[DraftMasking]
    sampler: Sampler
    tree: TreeSampler | None
    state: SlotState
    decoder: GuidedDecoder
    automata: DeviceAutomata | None
    exchange: Exchange
    inputs: Ring
    outputs: Ring
    timeline: PinnedSlots
    replay: DeviceArray
    depth: int
    programmatic: bool
    every_part: bool

    @property
    def draft_length(self) -> int:
        """Maximum number of drafts per request."""
        return self.mode.drafts

    @property
    def width(self) -> int:
        """Forward rows per request: the last token and its drafts."""
        return self.mode.drafts + 1

    @property
    def branch(self) -> int:
        """Maximum number of children per node; 1 for a chain."""
        return self.mode.branch

    def scratch(self, max_batch: int) -> RoundScratch:
        """Allocate the arrays that graphs with up to `max_batch` batch rows read and write."""
        config = self.target.config
        drafter = self.drafter
        features = 0
        draft_vocab = 0
        if drafter is not None:
            features = len(drafter.feature_layers) * config.hidden_size
            draft_vocab = drafter.vocab.size if drafter.vocab else 0
        return RoundScratch(
            self.device,
            max_batch,
            self.width,
            config.vocab_size,
            branch=self.branch,
            features=features,
            draft_vocab=draft_vocab,
        )


class RoundGraph:
    """Graph of a round for one batch bucket and draft length.

    The graph is built once and launched in every round that has this bucket and draft length.

    Parameters
    ----------
    resources
        Shared resources.
    scratch
        Row arrays for at least `batch` requests.
    batch
        Batch rows of the bucket, padding included.
    drafts
        Number of forward rows for drafts, per batch row. If it is less than the maximum number of
        drafts, the rows are assigned to the drafts that are most likely to be accepted.
    max_new_drafts
        Maximum number of drafts per request that this round generates for the next round. With 0,
        the drafter only processes the committed tokens.
    has_host_steps
        Whether grammar steps run on the host.

    Attributes
    ----------
    graphs : list of Graph
        Graph definitions; one, unless a subclass splits the round.
    execs : tuple of GraphExec
        Executables of the definitions.
    timed : tuple of Part
        Timed parts in order; part ``i`` is between time stamps ``i`` and ``i + 1``.
    """

    def __init__(
        self,
        resources: RoundResources,
        scratch: RoundScratch,
        batch: int,
        drafts: int,
        max_new_drafts: int,
        *,
        has_host_steps: bool = True,
    ):
        self.resources = resources
        self.batch = batch
        self.drafts = drafts
        self.max_new_drafts = max_new_drafts
        self.has_host_steps = has_host_steps
        self.graphs: list[Graph] = []
        self._add_graph()
        self._model, self._grammar = self._make_lanes()
        self._stamps = Stamps(
            resources.device,
            resources.timeline,
            resources.replay,
            self._model,
            resources.every_part,
        )
        rows = batch * (drafts + 1)
        feed = Feed(
            resources.device,
            batch,
            rows,
            max_new_drafts + 1,
            resources.branch,
            resources.state,
            resources.sampler,
            scratch,
        )
        decoder = resources.decoder if has_host_steps else None
        self._grammar_steps = GrammarSteps(
            decoder, resources.sampler.mask_rows, resources.automata, feed.row_slot
        )
        self._add_target_forward(feed)
        self._add_verification(feed)
        if resources.drafter is not None:
            self._add_drafting(feed, resources.drafter)
        self.timed: tuple[Part, ...] = tuple(self._stamps.parts)
        self.execs: tuple[GraphExec, ...] = tuple(
            graph.instantiate(priorities=True) for graph in self.graphs
        )

    @property
    def kind(self) -> str:
        """Kind of the graph: "host" if grammar steps run on the host, otherwise "device"."""
        return "host" if self.has_host_steps else "device"

    # Replays ------------------------------------------------------------------------------------

    def launch(self, stream: Stream) -> None:
        """Launch the round on a stream."""
        self.execs[0].launch(stream)

    def finish(self, stream: Stream, wait_for: Callable[[GraphExec], None]) -> None:
        """Launch the remaining graphs of a round whose results are published.

        A round of this class has a single graph, so this method does nothing.

        Parameters
        ----------
        stream
            Stream of the round.
        wait_for
            Function that waits until an executable has completed.
        """

    def check(self) -> None:
        """If a host step of the graph has failed in any replay so far, raise its error."""
        for executable in self.execs:
            executable.check()

    def close(self) -> None:
        """Release executables and definitions."""
        for executable, graph in zip(self.execs, self.graphs, strict=True):
            executable.close()
            graph.close()

    # Construction -------------------------------------------------------------------------------

    def _add_graph(self) -> None:
        """Append a graph definition to `graphs`. A subclass that splits the round adds several."""
        name = f"{self.kind} graph of {self.batch} rows, {self.drafts} drafts"
        if self.graphs:
            name = f"{name} ({len(self.graphs)})"
        self.graphs.append(
            Graph(self.resources.device, name, programmatic=self.resources.programmatic)
        )

    def _make_lanes(self) -> tuple[GraphLane, GraphLane]:
        """Return the model lane and the grammar lane of the round."""
        return self.graphs[0].lane("model"), self.graphs[0].lane("grammar", urgent=True)

    def _wait(self, mark: GraphMark) -> None:
        """Make the model lane wait for a mark of the grammar lane."""
        self._model.wait(mark)

    def _start_drafting(self) -> None:
        """Add the nodes that a subclass needs between verification and drafting; here none."""

    def _add_target_forward(self, feed: Feed) -> None:
        """Add the kernel ``begin``, the target forward pass and the grammar step ``open``.

        The grammar step fills mask rows (token bitmasks) concurrently with the forward pass.
        """
        resources = self.resources
        grammar = self._grammar
        self._add_begin(feed)
        begun = self._model.record("rows are assigned")
        if self.drafts < resources.draft_length:
            grammar.wait(begun)
        open_name = "open: missing rows"
        num_mask_rows = min(resources.width, feed.count - self.batch + 1)
        self._grammar_steps.add_open(grammar, num_mask_rows, begun, name=open_name)
        masks_ready = grammar.record("masks ready")
        scratch = feed.scratch
        rows = scratch.target_rows.first(feed.count, self.drafts + 1)
        resources.target.forward(self._model, rows, feed.features, scratch.logits[: feed.count])
        self._stamps.end("target forward")
        self._model.wait(masks_ready)
        self._stamps.end("wait for masks", open_name)

    def _add_begin(self, feed: Feed) -> None:
        """Add the kernel that assigns slots to batch rows, and forward rows to drafts."""
        resources = self.resources
        rows = feed.scratch.target_rows
        args = [
            resources.replay,
            *self._input_args(),
            resources.state.array,
            resources.state.slots,
            self.batch,
            feed.count,
            resources.exchange.memory,
            resources.exchange.layout,
            feed.row_slot,
            feed.first,
            feed.row_map.map,
            rows.token,
            rows.slot,
            rows.pos,
            rows.ancestors,
            *timeline_args(resources.timeline),
        ]
        kernel = resources.device.load(ROUND_KERNELS)["round_begin"]
        self._model.kernel(kernel, 1, _THREADS, args, name="begin")

    def _input_args(self) -> list[object]:
        """Return the arguments with which the kernel ``round_begin`` finds its entry in `inputs`.

        The host has written the slot of each batch row to this entry.
        """
        inputs = self.resources.inputs
        slots = inputs["slot"]
        stamp = inputs.stamp
        return [slots, slots.stride, stamp, stamp.stride, inputs.entries]

    def _before_publishing(self) -> None:
        """Add nodes that a subclass needs between verification and publication; here none."""

    def _add_verification(self, feed: Feed) -> None:
        """Add nodes for sampling, verification and, for trees, the compaction of the KV cache."""
        resources = self.resources
        sampler = resources.sampler
        sampler.target.sample(self._model, feed.scratch.logits[: feed.count], feed.row_map)
        sampler.verifier.verify(
            self._model, feed.row_map, resources.outputs, before_publishing=self._before_publishing
        )
        if resources.branch > 1 and feed.count > self.batch + 1:
            resources.target.compact(
                self._model,
                feed.row_slot,
                sampler.arrays.results[: self.batch],
                feed.features,
                feed.first,
            )
        self._stamps.end("verify", last=resources.drafter is None)

    def _add_drafting(self, feed: Feed, drafter: Drafter) -> None:
        """Add the nodes that process the committed tokens and generate the next round's drafts."""
        resources = self.resources
        model = self._model
        levels = min(resources.mode.levels, self.max_new_drafts)
        draft_sampler: ChainSampler | TreeSampler = resources.sampler.chain
        if resources.tree is not None and levels > 0:
            draft_sampler = resources.tree.limited_to(self.max_new_drafts)
        self._start_drafting()
        masking = resources.masking(
            self._grammar_steps,
            model,
            self._grammar,
            self._wait,
            self._stamps,
            feed,
            draft_sampler,
            levels,
        )
        masking.add_commit()
        if drafter.reads_mask_rows and self.max_new_drafts:
            masking.wait_for_commit()
        logits = drafter.start(model, feed)
        if drafter.proposes and self.max_new_drafts:
            resources.sampler.proposals.add_drafts(
                model, feed.proposal, feed.row_slot, feed.parents, self.max_new_drafts
            )
        remaining_levels = masking.add_all_levels(drafter, self.max_new_drafts)
        for level in range(1, remaining_levels + 1):
            if level > 1:
                logits = drafter.step(model, feed, level - 1)
            if logits is None:
                name = type(drafter).__name__
                raise DrafterError(f"{name} returned no logits for level {level - 1}")
            masking.before_draft(level, logits)
            draft_sampler.draft(model, logits, feed.row_slot, level)
            masking.after_draft(level)
        self._stamps.end("drafting", last=True)
