"""Calls with invalid arguments, which must raise an error that names the argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from sampling_round import TableRound, even_rows

from graft.cudagraph.errors import OptionError, ShapeError
from graft.sampling.arrays import SamplingArrays
from graft.sampling.exchange import Exchange
from graft.sampling.mask import MaskApply
from graft.sampling.mode import DraftMode
from graft.sampling.params import SamplingParams
from graft.sampling.results import output_ring
from graft.sampling.rows import DraftVocab
from graft.sampling.state import SlotRequest
from graft.sampling.tree import TreeSampler


@pytest.fixture
def r(make_round) -> TableRound:
    """Return a round with four slots, two drafts and forty token ids."""
    return make_round(slots=4, draft_length=2, vocab=40)


def zeros(r: TableRound, *shape: int, dtype: str = "int32"):
    return r.device.zeros(shape, dtype)


def logits(r: TableRound, rows: int = 4, columns: int = 40, dtype: str = "float32"):
    return r.device.zeros((rows, columns), dtype)


def join(slot: int = 0, **changes: object) -> Callable[[TableRound], None]:
    values = {"position": 5, "last": 1, "epoch": 1, "limit": 20, **changes}
    request = SlotRequest(params=SamplingParams(), **values)
    return lambda r: r.state.join(r.lane, slot, request)


def check(**values: object) -> Callable[[TableRound], None]:
    return lambda r: SamplingParams(**values).check(r.state.vocab_size)


def mode(**values: object) -> Callable[[TableRound], DraftMode]:
    return lambda r: DraftMode(**values)


def target(r: TableRound, array, width: int, row_slot=None, **changes: object) -> None:
    rows = even_rows(r.device, r.row_slot if row_slot is None else row_slot, width)
    r.sampler.target.sample(r.lane, array, replace(rows, **changes))


def arrays(r: TableRound, **changes: object) -> SamplingArrays:
    values = {
        "state": r.state,
        "exchange": r.exchange,
        "replay": r.replay_ptr,
        "token_limit": 40,
        "draft_vocab": DraftVocab(40),
        "max_batch": 4,
    }
    return SamplingArrays(**{**values, **changes})


def exchange(r: TableRound, slots: int = 4, vocab_size: int = 40) -> Exchange:
    return Exchange(r.device, slots, vocab_size, DraftMode.chain(2))


def verify(r: TableRound, slots: int, drafts: int) -> None:
    ring = output_ring(r.device, 2, slots, drafts)
    r.sampler.verifier.verify(r.lane, even_rows(r.device, r.row_slot, 1), ring)


def apply_mask(r: TableRound, **changes: object) -> None:
    values = {"logits": logits(r, 2, 64), "mask": zeros(r, 2, 2), **changes}
    MaskApply(r.device)(r.lane, **values)


MASKED = {"drafts": 4, "levels": 4, "masking": "probe"}

REFUSALS = {
    "join-slot-high": (join(4), OptionError, "slot"),
    "join-slot-negative": (join(-1), OptionError, "slot"),
    "join-position": (join(position=-1), OptionError, "position"),
    "join-limit": (join(limit=6), OptionError, "limit"),
    "check-temperature": (check(temperature=-0.1), OptionError, "temperature"),
    "check-temperature-nan": (check(temperature=float("nan")), OptionError, "temperature"),
    "check-top-k": (check(top_k=-1), OptionError, "top_k"),
    "check-top-p": (check(top_p=1.1), OptionError, "top_p"),
    "check-min-p": (check(min_p=-0.1), OptionError, "min_p"),
    "check-verify": (check(verify="traversal"), OptionError, "verify"),
    "check-stop-ids": (check(stop_ids=tuple(range(65))), OptionError, "64 stop ids"),
    "check-sample": (check(sample=1 << 24), OptionError, "sample"),
    "mode-drafts-negative": (mode(drafts=-1), OptionError, "drafts must be"),
    "mode-drafts-high": (mode(drafts=65), OptionError, "drafts must be"),
    "mode-levels": (mode(drafts=4, levels=5), OptionError, "levels must be"),
    "mode-branch-low": (mode(drafts=4, levels=4, branch=0), OptionError, "branch must be"),
    "mode-branch-high": (mode(drafts=4, levels=4, branch=33), OptionError, "branch must be"),
    "mode-proposed-fill": (
        mode(drafts=4, masking="fill"),
        OptionError,
        "masking of proposed drafts must be one of 'none'",
    ),
    "mode-tree-fill": (
        mode(drafts=4, levels=2, branch=3, masking="fill"),
        OptionError,
        "masking of tree drafts",
    ),
    "mode-unknown-masking": (
        mode(drafts=4, levels=4, masking="other"),
        OptionError,
        "masking of chain drafts",
    ),
    "mode-fed-nodes": (
        mode(drafts=40, levels=9, branch=9),
        OptionError,
        "nodes fed to the drafter must be",
    ),
    "mode-candidates-unmasked": (
        mode(drafts=4, levels=4, candidates=1),
        OptionError,
        "candidates must be",
    ),
    "mode-candidates-missing": (mode(**MASKED), OptionError, "candidates must be"),
    "mode-candidates-high": (mode(**MASKED, candidates=65), OptionError, "candidates must be"),
    "mode-candidates-tree": (
        mode(drafts=4, levels=2, branch=2, masking="probe", candidates=16),
        OptionError,
        "candidates must be",
    ),
    "target-columns": (
        lambda r: target(r, logits(r, columns=39), 1),
        ShapeError,
        r"logits is float32\[4, 39\], expected .*V=40",
    ),
    "target-dtype": (
        lambda r: target(r, logits(r, dtype="float16"), 1),
        ShapeError,
        "logits is float16",
    ),
    "target-rows": (lambda r: target(r, logits(r), 3), ShapeError, "R=12"),
    "target-too-many-rows": (lambda r: target(r, logits(r, 16), 4), OptionError, "rows R"),
    "target-batch": (lambda r: target(r, logits(r, 5), 1, zeros(r, 5)), OptionError, "batch rows"),
    "target-row-slot-dtype": (
        lambda r: target(r, logits(r), 1, zeros(r, 4, dtype="int64")),
        ShapeError,
        "row_slot",
    ),
    "target-first": (lambda r: target(r, logits(r), 1, first=zeros(r, 5)), ShapeError, "first"),
    "target-map-size": (
        lambda r: target(r, logits(r, 3), 1, map=zeros(r, 3)),
        OptionError,
        "rows R",
    ),
    "target-map-dtype": (
        lambda r: target(r, logits(r), 1, map=zeros(r, 4, dtype="int64")),
        ShapeError,
        "map",
    ),
    "draft-number": (
        lambda r: r.sampler.chain.draft(r.lane, logits(r), r.row_slot, 3),
        OptionError,
        "j must be",
    ),
    "draft-rows": (
        lambda r: r.sampler.chain.draft(r.lane, logits(r, 3), r.row_slot, 1),
        ShapeError,
        "draft_logits",
    ),
    "candidates-mode": (
        lambda r: r.sampler.chain.candidates(r.lane, logits(r), r.row_slot, 1),
        OptionError,
        "requires masking 'probe'",
    ),
    "verify-ring-drafts": (lambda r: verify(r, 4, 1), OptionError, "words of an output row"),
    "verify-ring-slots": (lambda r: verify(r, 3, 2), OptionError, "output rows"),
    "sampler-token-limit": (lambda r: arrays(r, token_limit=41), OptionError, "token_limit"),
    "sampler-max-batch": (lambda r: arrays(r, max_batch=5), OptionError, "max_batch"),
    "sampler-replay": (lambda r: arrays(r, replay=zeros(r, 2)), ShapeError, "replay"),
    "sampler-exchange": (
        lambda r: arrays(r, exchange=exchange(r, slots=3)),
        OptionError,
        "exchange slots",
    ),
    "sampler-t2d-missing": (
        lambda r: arrays(r, draft_vocab=DraftVocab(40, zeros(r, 40))),
        OptionError,
        "t2d",
    ),
    "sampler-t2d-size": (
        lambda r: arrays(r, draft_vocab=DraftVocab(40, zeros(r, 40), zeros(r, 39))),
        ShapeError,
        "t2d",
    ),
    "sampler-draft-vocab": (
        lambda r: arrays(r, draft_vocab=DraftVocab(41)),
        OptionError,
        "draft vocabulary",
    ),
    "exchange-slots": (lambda r: exchange(r, slots=0), OptionError, "slots"),
    "exchange-vocab-size": (lambda r: exchange(r, vocab_size=0), OptionError, "vocab_size"),
    "tree-of-chain": (
        lambda r: TreeSampler(r.sampler.arrays),
        OptionError,
        "requires a tree that grows level by level",
    ),
    "mask-logits-dtype": (
        lambda r: apply_mask(r, logits=logits(r, 2, 64, dtype="int32")),
        ShapeError,
        "logits is int32",
    ),
    "mask-words": (lambda r: apply_mask(r, mask=zeros(r, 2, 1)), ShapeError, "W=1"),
    "mask-rows": (lambda r: apply_mask(r, mask=zeros(r, 1, 2)), ShapeError, "N=1"),
    "mask-row-size": (lambda r: apply_mask(r, mask_row=zeros(r, 3)), ShapeError, "mask_row"),
    "mask-d2t-size": (lambda r: apply_mask(r, d2t=zeros(r, 63)), ShapeError, "d2t"),
    "mask-token-limit": (lambda r: apply_mask(r, token_limit=65), OptionError, "token_limit"),
}


@pytest.mark.parametrize("call, error, words", REFUSALS.values(), ids=REFUSALS.keys())
def test_sampling_call_rejects_invalid_arguments(r, call, error, words):
    with pytest.raises(error, match=words):
        call(r)
    assert not r.state.to_host()["active"].any()
