"""One round of guided speculative decoding as one explicit CUDA graph.

Two lanes meet at marks::

    model    begin - target forward - [masks] - verify - extend - [row 0] - draft 1 - step 2 - ...
    grammar  open ----------------------^          `- commit ---------^      `- row 1 ----^

`open` fills what the rows of this round still lack (row K of the drafts made last round, or all
rows after unmasked drafting) beside the target forward; `commit` advances the matchers by what was
accepted and fills row 0 beside the drafter's extend; row j is filled beside the drafter step that
feeds draft j.

Where drafts are probed instead, no row is filled while drafting; each draft waits for the answer to
its candidates, and `open` fills all rows::

    model    ... extend - candidates 1 - [answer] - draft 1 - step 2 - candidates 2 - [answer] - ...
    grammar  commit ------------------- probe 1 ----------------------------------- probe 2 ----^
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graft.cudagraph.device import Device
from graft.cudagraph.graph import Graph, GraphExec, GraphLane, GraphMark
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.cudagraph.pinned import PinnedSlots, Ring
from graft.grammar.decoder import GuidedDecoder
from graft.models.eagle3 import Eagle3Drafter
from graft.models.llama import LlamaModel
from graft.models.rows import Rows
from graft.models.timing import RoundTiming
from graft.sampling.sampler import Sampler
from graft.sampling.state import SlotState

THREADS = 128
KERNELS = Path(__file__).parent / "kernels" / "round.cu"


@dataclass(frozen=True)
class RoundParts:
    """Everything a round is made of; shared by the graphs of all buckets."""

    device: Device
    target: LlamaModel
    drafter: Eagle3Drafter | None
    sampler: Sampler
    state: SlotState
    decoder: GuidedDecoder
    exchange: PinnedSlots
    inputs: Ring
    outputs: Ring
    timeline: PinnedSlots
    replay: DeviceArray
    draft_length: int
    masked_drafts: bool

    @property
    def timing(self) -> RoundTiming:
        """What the round stamps on its timeline."""
        return RoundTiming(self.draft_length, self.masked_drafts, self.decoder.probes)

    @property
    def width(self) -> int:
        """Rows of the target forward per request: `last` and the drafts."""
        return self.draft_length + 1


class RoundScratch:
    """Row-indexed arrays of the largest bucket; every smaller bucket uses their beginnings.

    Replays of all buckets run on one stream, one after another, so they may share scratch.
    """

    def __init__(self, parts: RoundParts, max_batch: int):
        device, width = parts.device, parts.width
        rows = max_batch * width

        def ints(*shape: int) -> DeviceArray:
            return device.zeros(shape, "int32")

        self.row_slot = ints(max_batch)
        self.target_rows = Rows(ints(rows), ints(rows), ints(rows))
        self.extend_rows = Rows(ints(rows), ints(rows), ints(rows))
        self.step_rows = Rows(ints(max_batch), ints(max_batch), ints(max_batch))
        self.gather = ints(max_batch)
        self.logits = device.zeros((rows, parts.target.config.vocab_size), "float32")
        drafted = 0 if parts.drafter is None else 1  # without a drafter nobody reads these two
        features = 3 * parts.target.config.hidden_size * drafted
        draft_vocab = 1 if parts.drafter is None else parts.drafter.draft_vocab
        self.features = device.zeros((rows, max(features, 1)), "float32")
        self.draft_logits = device.zeros((max_batch, draft_vocab), "float32")


def _rows(rows: Rows, count: int) -> Rows:
    return Rows(rows.token[:count], rows.slot[:count], rows.pos[:count])


class RoundGraph:
    """The graph of one batch bucket: built once, replayed every round.

    Parameters
    ----------
    parts : what the round is made of.
    scratch : row-indexed arrays, at least `batch` requests wide.
    batch : the bucket: requests (padding rows included) per replay.
    """

    def __init__(self, parts: RoundParts, scratch: RoundScratch, batch: int):
        self.parts, self.scratch, self.batch = parts, scratch, batch
        self._kernels = parts.device.load(KERNELS)
        self.graph = Graph(parts.device, name=f"round of {batch}")
        model, grammar = self.graph.lane("model"), self.graph.lane("grammar")

        parts.decoder.add(grammar, parts.decoder.open_work(), name="open: missing rows")
        masks_ready = grammar.record("masks ready")
        self._begin(model)
        self._target(model)
        model.wait(masks_ready)
        self._stamp(model, "masks")
        self._verify(model)
        if parts.drafter is not None:
            self._draft(model, grammar, parts.drafter)
        elif parts.draft_length > 0:
            self._draft_forced(model, grammar)
        self.exec: GraphExec = self.graph.instantiate()

    def _draft(self, model: Lane, grammar: GraphLane, drafter: Eagle3Drafter) -> None:
        """Commit what was accepted, and draft the next K tokens."""
        parts, masked = self.parts, self.parts.masked_drafts
        probed = parts.decoder.probes
        tokens_known = model.record("tokens known")
        grammar.wait(tokens_known)
        name = "commit" if probed else "commit, fill row 0"
        parts.decoder.add(grammar, parts.decoder.commit_work(), name=name)
        ready = grammar.record("row 0 ready")
        hidden = self._extend(model, drafter)
        for j in range(1, parts.draft_length + 1):
            if j > 1:
                if masked and not probed:
                    ready = self._grammar_step(model, grammar, j - 1, f"fill row {j - 1}")
                hidden = self._step(model, drafter, hidden, j)
            logits, row_slot = self.scratch.draft_logits[: self.batch], self._row_slot
            if probed:
                parts.sampler.candidates(model, logits, row_slot, j)
            if masked or j == 1:
                self._stamp(model, "extend" if j == 1 else f"step{j}")
            if probed:
                ready = self._grammar_step(model, grammar, j, f"probe {j}")
            if masked:
                model.wait(ready)
            if masked or j == 1:
                self._stamp(model, f"row{j - 1}")
            parts.sampler.draft(model, logits, row_slot, j, masked)
        self._stamp(model, "end")

    def _draft_forced(self, model: Lane, grammar: GraphLane) -> None:
        """Without a drafter: commit, and draft what the grammar forces."""
        grammar.wait(model.record("tokens known"))
        work = self.parts.decoder.commit_work()
        self.parts.decoder.add(grammar, work, name="commit, fill row 0")
        self._stamp(model, "extend")
        model.wait(grammar.record("rows ready"))
        self._stamp(model, "row0")
        self.parts.sampler.forced(model, self._row_slot)
        self._stamp(model, "end")

    def _grammar_step(self, model: Lane, grammar: GraphLane, j: int, name: str) -> GraphMark:
        """The grammar's step for draft j, once the model lane is here; done at the mark."""
        grammar.wait(model.record(f"{name}: asked"))
        self.parts.decoder.add(grammar, self.parts.decoder.draft_work(j), name=name)
        return grammar.record(f"{name}: done")

    @property
    def _row_slot(self) -> DeviceArray:
        return self.scratch.row_slot[: self.batch]

    def _stamp(self, lane: Lane, name: str) -> None:
        timeline = self.parts.timeline.field("ns")
        args = [self.parts.replay, timeline, timeline.stride, self.parts.timeline.slots]
        kernel, column = self._kernels["stamp_time"], self.parts.timing.columns.index(name)
        lane.kernel(kernel, 1, 1, [*args, column], name=f"stamp {name}")

    def _begin(self, lane: Lane) -> None:
        p, s = self.parts, self.scratch
        state, ring_rows, stamp = p.state, p.inputs.field("slot"), p.inputs.stamp
        rows = s.target_rows
        lane.kernel(
            self._kernels["round_begin"],
            1,
            THREADS,
            [
                p.replay, ring_rows, ring_rows.stride, stamp, stamp.stride, p.inputs.entries,
                state.n, state.last, state.drafts, state.drafts.shape[1], state.draft_len,
                state.active, state.limit, state.n.size, self.batch, p.width,
                s.row_slot, rows.token, rows.slot, rows.pos,
            ],
            name="begin",
        )  # fmt: skip
        self._stamp(lane, "begin")

    def _target(self, lane: Lane) -> None:
        s, count = self.scratch, self.batch * self.parts.width
        features = None if self.parts.drafter is None else s.features[:count]
        hidden = self.parts.target.forward(lane, _rows(s.target_rows, count), features)
        self.parts.target.head(lane, hidden, s.logits[:count])
        self._stamp(lane, "target")

    def _verify(self, lane: Lane) -> None:
        p, s, row_slot = self.parts, self.scratch, self._row_slot
        p.sampler.target(lane, s.logits[: self.batch * p.width], row_slot, p.width)
        p.sampler.verify(lane, row_slot, p.width, p.replay, p.outputs)
        self._stamp(lane, "verify")

    def _extend(self, lane: Lane, drafter: Eagle3Drafter) -> DeviceArray:
        p, s = self.parts, self.scratch
        count, rows = self.batch * p.width, s.extend_rows
        lane.kernel(
            self._kernels["extend_rows"],
            1,
            THREADS,
            [
                s.row_slot, p.state.active, p.sampler.count, p.sampler.committed_tok,
                p.sampler.old_n, self.batch, p.width, rows.token, rows.slot, rows.pos, s.gather,
            ],
            name="extend rows",
        )  # fmt: skip
        out = drafter.entries(lane, _rows(rows, count), s.features[:count])
        hidden = drafter.gather(lane, out, s.gather[: self.batch])
        drafter.head(lane, hidden, s.draft_logits[: self.batch])
        return hidden

    def _step(
        self, lane: Lane, drafter: Eagle3Drafter, hidden: DeviceArray, step: int
    ) -> DeviceArray:
        p, s = self.parts, self.scratch
        state, rows = p.state, _rows(s.step_rows, self.batch)
        lane.kernel(
            self._kernels["step_rows"],
            1,
            THREADS,
            [
                s.row_slot, state.active, p.sampler.count, state.n, state.drafts,
                state.drafts.shape[1], state.draft_len, state.limit, self.batch, step,
                rows.token, rows.slot, rows.pos,
            ],
            name=f"step {step} rows",
        )  # fmt: skip
        out = drafter.step(lane, rows, hidden)
        drafter.head(lane, out, s.draft_logits[: self.batch])
        return out

    def close(self) -> None:
        """Drop the executable and the definition."""
        self.exec.close()
        self.graph.close()
