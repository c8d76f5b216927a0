"""One round of guided speculative decoding as one explicit CUDA graph.

Two lanes meet at marks::

    model    begin - target forward - [masks] - verify - draft ...
    grammar  open ----------------------^          `- commit ...

`open` fills what the rows of this round still lack, beside the target forward: the row behind the
drafts made last round, or all rows where drafting filled none. Where a round has fewer rows than
there may be drafts, `begin` cuts some, and `open` waits for it. What follows verification is drawn
in `legality`.

Composed in two, for comparison, a round's graph ends with verification; the drafter has graphs of
its own, one more for each grammar step that it waits for, and the host launches every one of them
when the one before is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graft.cudagraph.device import Device
from graft.cudagraph.graph import Graph, GraphExec, GraphLane
from graft.cudagraph.memory import DeviceArray
from graft.cudagraph.pinned import PinnedSlots, Ring
from graft.grammar.decoder import GuidedDecoder
from graft.models.drafters.base import Drafter
from graft.models.drafters.feed import Feed, RoundScratch
from graft.models.errors import DrafterError
from graft.models.llm.llama import LlamaModel
from graft.models.round.masking import DraftMasking
from graft.models.round.timing import Part, Stamps, timeline_args
from graft.sampling.exchange import Exchange
from graft.sampling.sampler import Sampler
from graft.sampling.state import SlotState
from graft.sampling.tree import TreeSampler

_THREADS = 128
ROUND_KERNELS = Path(__file__).parent / "kernels" / "round.cu"


@dataclass(frozen=True)
class RoundParts:
    """Everything a round is made of; shared by the graphs of all buckets."""

    device: Device
    target: LlamaModel
    drafter: Drafter | None
    masking: type[DraftMasking]
    sampler: Sampler
    tree: TreeSampler | None
    state: SlotState
    decoder: GuidedDecoder
    exchange: Exchange
    inputs: Ring
    outputs: Ring
    timeline: PinnedSlots
    replay: DeviceArray
    draft_length: int
    depth: int  # most drafts that a round may accept: a tree's levels
    composition: str
    programmatic: bool
    every_part: bool  # whether the timeline has every part of a round

    @property
    def width(self) -> int:
        """Rows of the target forward per request: `last` and the drafts."""
        return self.draft_length + 1

    @property
    def branch(self) -> int:
        """Most drafts under one token; 1: they are a chain."""
        return self.drafter.shape.branch if self.drafter else 1

    def scratch(self, max_batch: int) -> RoundScratch:
        """Arrays for buckets of up to `max_batch` requests."""
        config = self.target.config
        drafter = self.drafter
        return RoundScratch(
            self.device,
            max_batch,
            self.width,
            config.vocab_size,
            branch=self.branch,
            features=len(drafter.taps) * config.hidden_size if drafter else 0,
            draft_vocab=drafter.vocab.size if drafter and drafter.vocab else 0,
        )


class RoundGraph:
    """The graphs of one batch bucket and number of rows: built once, replayed every round, one
    behind the other.

    Parameters
    ----------
    parts : what the round is made of.
    scratch : row-indexed arrays, at least `batch` requests wide.
    batch : the bucket: requests (padding rows included) per replay.
    drafts : so many times the bucket's are the drafts that it has a place for. A fixed draft length
        is as many as a request can have; with fewer they go to whose are likely to be accepted.
    made : most drafts per request that it makes for the next round; with 0 the drafter only takes
        in what was committed.

    Attributes
    ----------
    graphs, execs : one, unless the round is composed in two.
    timed : the parts of its timeline.
    """

    def __init__(
        self, parts: RoundParts, scratch: RoundScratch, batch: int, drafts: int, made: int
    ):
        self.parts = parts
        self.batch = batch
        self.drafts = drafts
        self.made = made
        self._name = f"round of {batch}, {drafts} drafts"
        self.graphs = list[Graph]()
        self._add_graph()
        model, grammar = self._lanes = [self.graphs[0].lane(name) for name in ("model", "grammar")]
        stamps = Stamps(parts.device, parts.timeline, parts.replay, model, parts.every_part)
        rows = batch * (drafts + 1)
        feed = Feed(
            parts.device, batch, rows, made + 1, parts.branch, parts.state, parts.sampler, scratch
        )
        self._begin(model, feed)
        if drafts < parts.draft_length:
            grammar.wait(model.record("places are given"))
        opening = "open: missing rows"
        parts.decoder.add(grammar, parts.decoder.open_work(), name=opening)
        parts.exchange.copy_masks_to_device(grammar, 0, min(parts.width, rows - batch + 1))
        masks_ready = grammar.record("masks ready")
        self._target(model, feed)
        stamps.end("target forward")
        model.wait(masks_ready)
        stamps.end("wait for masks", opening)
        parts.sampler.target(model, scratch.logits[:rows], feed.rows)
        parts.sampler.verify(model, feed.rows, parts.outputs)
        if parts.branch > 1 and rows > batch + 1:
            parts.target.compact(
                model, feed.row_slot, parts.sampler.rows[:batch], feed.features, feed.first
            )
        stamps.end("verify", last=parts.drafter is None)
        if parts.drafter is not None:
            self._draft(model, grammar, stamps, feed, parts.drafter)
        self.timed: tuple[Part, ...] = tuple(stamps.parts)
        self.execs: tuple[GraphExec, ...] = tuple(
            graph.instantiate(priorities=True) for graph in self.graphs
        )

    def _add_graph(self) -> None:
        name = f"{self._name} ({len(self.graphs)})" if self.graphs else self._name
        self.graphs.append(Graph(self.parts.device, name, programmatic=self.parts.programmatic))

    def _begin(self, lane: GraphLane, feed: Feed) -> None:
        p = self.parts
        rows = feed.scratch.target_rows
        ring_rows = p.inputs.field("slot")
        stamp = p.inputs.stamp
        args = [
            p.replay,
            ring_rows,
            ring_rows.stride,
            stamp,
            stamp.stride,
            p.inputs.entries,
            p.state.array,
            p.state.slots,
            self.batch,
            feed.count,
            p.exchange.memory,
            p.exchange.layout,
            feed.row_slot,
            feed.first,
            feed.rows.map,
            rows.token,
            rows.slot,
            rows.pos,
            rows.ancestors,
            *timeline_args(p.timeline),
        ]
        lane.kernel(p.device.load(ROUND_KERNELS)["round_begin"], 1, _THREADS, args, name="begin")

    def _target(self, lane: GraphLane, feed: Feed) -> None:
        p = self.parts
        count = feed.count
        scratch = feed.scratch
        rows = scratch.target_rows.first(count, self.drafts + 1)
        p.target.forward(lane, rows, feed.features, scratch.logits[:count])

    def _draft(
        self, model: GraphLane, grammar: GraphLane, stamps: Stamps, feed: Feed, drafter: Drafter
    ) -> None:
        """Commit what was accepted, and make the drafts of the next round."""
        parts = self.parts
        levels = min(len(drafter.shape.levels), self.made)
        draws = parts.tree.of(self.made) if parts.tree and levels else parts.sampler
        wait = model.wait
        if parts.composition == "two":
            wait = self._cut
            self._cut()
            stamps.end("host")
        masking = parts.masking(parts.decoder, model, grammar, wait, stamps, feed, draws, levels)
        masking.committed()
        if drafter.reads_rows and self.made:
            masking.wait_rows()
        logits = drafter.start(model, feed)
        if drafter.proposes and self.made:
            parts.sampler.place(model, feed.proposal, feed.row_slot, feed.parents, self.made)
        for level in range(1, masking.at_once(drafter, self.made) + 1):
            if level > 1:
                logits = drafter.step(model, feed, level - 1)
            if logits is None:
                raise DrafterError(f"{type(drafter).__name__}: level {level - 1} has no logits")
            masking.before(level, logits)
            draws.draft(model, logits, feed.row_slot, level, masking.masked)
            masking.after(level)
        stamps.end("drafting", last=True)

    def _cut(self, mark: object = None) -> None:
        """End a graph; the lanes go on in the next, which is launched behind all marks of this."""
        self._add_graph()
        for lane in self._lanes:
            lane.graph = self.graphs[-1].lane(lane.name).graph

    def close(self) -> None:
        """Drop the executables and the definitions."""
        for executable, graph in zip(self.execs, self.graphs, strict=True):
            executable.close()
            graph.close()
