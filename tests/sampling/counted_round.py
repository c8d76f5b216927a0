"""Program whose kernels `test_kernel_counts` counts: one round with drafts of a given mode.

The batch has three of eight slots. Slots 1 and 3 have a grammar that allows every id; slot 5 has
none.
"""

from __future__ import annotations

import sys

import numpy as np
import reference_round as ref
from sampling_round import TableRound

from graft.cudagraph.device import open_device
from graft.sampling.mode import TREE_CANDIDATES, DraftMode
from graft.sampling.params import SamplingParams
from graft.sampling.tree import TreeSampler

SLOTS = 8
CONSTRAINED = (1, 3)
UNCONSTRAINED = 5
BATCH = (*CONSTRAINED, UNCONSTRAINED)
DRAFTS = 3
VOCAB = 4096
MODES = {
    "fill": DraftMode.chain(DRAFTS),
    "probe": DraftMode.chain(DRAFTS, "probe", 4),
    "lattice": DraftMode.chain(DRAFTS, "lattice-probe", 4),
    "tree": DraftMode(
        drafts=DRAFTS, levels=2, branch=2, masking="probe", candidates=TREE_CANDIDATES
    ),
}


class CountedRound:
    """A round of a draft mode, in which each kernel processes all three requests."""

    def __init__(self, mode: str) -> None:
        device = open_device()
        self.mode = mode
        self.stream = device.stream("counted")
        self.round = TableRound(
            device,
            self.stream,
            slots=SLOTS,
            vocab=VOCAB,
            mode=MODES[mode],
            block=512,
            parts=2,
            places=DRAFTS,
        )
        self.rng = np.random.default_rng(1)
        for i in range(SLOTS):
            self.round.put(i, self._slot(i))
        self.fill_rows(range(DRAFTS + 1))

    def _slot(self, seed: int) -> ref.Slot:
        params = SamplingParams(logit_bias={5: 1.5}, frequency_penalty=0.2, logprobs=20)
        slot = ref.Slot(
            n=10,
            tree=ref.chain(1),
            limit=100,
            seed=seed,
            filter=ref.Filter(0.8, top_p=0.9),
            adjust=ref.Adjustment(params),
        )
        for _ in range(DRAFTS):
            ref.keep(slot, int(self.rng.integers(VOCAB)), ref.POINT, None)
        return slot

    def fill_rows(self, rows: range) -> None:
        """Fill mask rows of all slots for their current positions."""
        slots = self.round.state.to_host()
        everything = np.ones(VOCAB, bool)
        for i in range(SLOTS):
            is_free = i == UNCONSTRAINED
            for j in rows:
                row = ref.MaskRow(
                    ref.FREE if is_free else ref.READY,
                    int(slots["epoch"][i]),
                    int(slots["n"][i]) + j,
                    everything,
                    detail=int(is_free),
                )
                self.round.write_mask(i, j, row)

    def logits(self, rows: int) -> np.ndarray:
        """Return random logits of a number of rows."""
        return self.rng.normal(0, 2, (rows, VOCAB)).astype(np.float32)

    def run(self) -> None:
        """Verify the drafts of all requests, and generate new ones."""
        r = self.round
        r.rows(BATCH)
        r.verify(self.logits(len(BATCH) * r.width).reshape(len(BATCH), r.width, VOCAB))
        self.fill_rows(range(DRAFTS))
        getattr(self, f"draft_{self.mode}")()
        proposal = r.device.zeros((len(BATCH), DRAFTS), "int32")
        r.sampler.proposals.forced(r.lane, r.row_slot, proposal)
        self.stream.synchronize()

    def draft_fill(self) -> None:
        """Sample each draft under its mask row."""
        for j in range(1, DRAFTS + 1):
            self.round.draft(j, self.logits(len(BATCH)))

    def draft_probe(self) -> None:
        """Accept a candidate of one request, and reject all candidates of the other."""
        r = self.round
        for j in range(1, DRAFTS + 1):
            logits = r.upload(self.logits(len(BATCH)))
            r.candidates(j, logits)
            for slot, answer in zip(CONSTRAINED, (7, -1), strict=True):
                r.exchange.answer[slot] = (r.replay, j, answer)
            r.draft(j, logits)

    def draft_lattice(self) -> None:
        """Answer a lattice probe with a chain."""
        r = self.round
        r.candidates(DRAFTS, self.logits(len(BATCH) * DRAFTS))
        for slot in CONSTRAINED:
            r.exchange.answer[slot] = (r.replay, 0, DRAFTS)
            r.exchange.legal[slot] = [4, 5, 6, 0, 1, 2]
        r.sampler.proposals.add_drafts(r.lane, None, r.row_slot)
        self.stream.synchronize()

    def draft_tree(self) -> None:
        """Grow a tree from the two best candidates of each node."""
        r = self.round
        tree = TreeSampler(r.sampler.arrays)
        for level, nodes in ((1, 1), (2, 2)):
            logits = r.upload(self.logits(len(BATCH) * nodes))
            tree.candidates(r.lane, logits, r.row_slot, level)
            self.stream.synchronize()
            for slot in CONSTRAINED:
                r.exchange.answer[slot] = (r.replay, level, nodes)
                r.exchange.legal[slot] = 3
            tree.draft(r.lane, logits, r.row_slot, level)
            self.stream.synchronize()


if __name__ == "__main__":
    CountedRound(sys.argv[1]).run()
