"""What the guided decoder refuses from its caller."""

from __future__ import annotations

import pytest
from guide_util import SPECS, byte_vocabulary, exchange_for, run_work

from graft.cudagraph.errors import OptionError
from graft.grammar import GuidedDecoder, GuidedRequest, GuideError, XGrammarBackend

SIZE = 270


def make(**changes) -> GuidedDecoder:
    exchange = exchange_for(2, 3, SIZE, changes.pop("candidates", 0))
    return GuidedDecoder(exchange, **{"masked_drafts": True, "ring": 3, **changes})


@pytest.fixture
def decoder() -> GuidedDecoder:
    return make()


def matcher(xgrammar):
    return xgrammar.compile(SPECS["regex"]).matcher()


def test_replays_are_published_in_order_and_never_lap(decoder):
    """Replay numbers count up by one; an entry is reused only after its replay retired."""
    with pytest.raises(GuideError, match="replay 2 published after replay 0"):
        decoder.publish(2, [])
    for replay in (1, 2, 3):
        decoder.publish(replay, [])
    with pytest.raises(GuideError, match="replay 4 would overwrite replay 1"):
        decoder.publish(4, [])
    decoder.retire(1)
    decoder.publish(4, [])
    with pytest.raises(GuideError, match="replay 1 is not in flight"):
        decoder.retire(1)


def test_bad_snapshots_are_refused_whole(decoder, xgrammar):
    """Slots out of range or named twice, shared and foreign matchers: nothing is published."""
    foreign = matcher(XGrammarBackend(byte_vocabulary(300)))
    shared = matcher(xgrammar)
    for requests, message in (
        ([GuidedRequest(2, 1, None, 0)], "slot 2"),
        ([GuidedRequest(-1, 1, None, 0)], "slot -1"),
        ([GuidedRequest(0, 1, None, 0), GuidedRequest(0, 2, None, 0)], "named twice"),
        ([GuidedRequest(0, 1, foreign, 0)], "300 columns"),
        ([GuidedRequest(0, 1, shared, 0), GuidedRequest(1, 2, shared, 0)], "already belongs"),
    ):
        with pytest.raises(GuideError, match=message):
            decoder.publish(1, requests)
    decoder.publish(1, [GuidedRequest(0, 1, shared, 0)])  # none of them took the matcher
    for other in (GuidedRequest(0, 1, matcher(xgrammar), 0), GuidedRequest(0, 1, shared, 5)):
        with pytest.raises(GuideError, match="epoch 1 has another request"):
            decoder.publish(2, [other])
    with pytest.raises(GuideError, match="already belongs"):
        decoder.publish(2, [GuidedRequest(1, 2, shared, 0)])
    decoder.publish(2, [GuidedRequest(0, 1, shared, 0)])


def test_a_closed_decoder_does_nothing(decoder, xgrammar):
    """close() refuses while replays are in flight; afterwards steps stand down."""
    work = decoder.open_work()
    decoder.publish(1, [GuidedRequest(0, 1, matcher(xgrammar), 0)])
    with pytest.raises(GuideError, match=r"replays \[1\] have not been retired"):
        decoder.close()
    decoder.retire(1)
    decoder.close()
    run_work(work)
    assert decoder.counters()["missing_snapshots"] == 1
    with pytest.raises(GuideError, match="closed"):
        decoder.publish(2, [])
    with pytest.raises(GuideError, match="closed"):
        decoder.commit_work()


@pytest.mark.parametrize("changes, message", [
    ({"ring": 1}, "ring is 1"),
    ({"transport": "python"}, "'python', must be one of native, mailbox, spinkernel"),
    ({"threads": 0}, "threads is 0"),
    ({"budget_us": 0.5}, "budget_us is 0.5"),
    ({"budget_us": float("nan")}, "budget_us is nan"),
    ({"candidates": 4, "masked_drafts": False}, "for masked drafts only"),
])  # fmt: skip
def test_bad_options_are_refused_by_name(changes, message):
    """An option out of range raises OptionError with its name and value."""
    with pytest.raises(OptionError, match=message):
        make(**changes)


def test_draft_steps_exist_only_where_a_row_follows():
    """Draft K's row is made by the next open, so steps are 1..K-1, and only for masked drafts."""
    decoder = make()
    for j in (0, 3, 4):
        with pytest.raises(OptionError, match=f"draft step {j}"):
            decoder.draft_work(j)
    with pytest.raises(OptionError, match="masked_drafts"):
        make(masked_drafts=False).draft_work(1)
