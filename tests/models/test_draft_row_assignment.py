"""Assignment of forward rows to drafts: the kernel `round_begin`, compared with a reference."""

import itertools
from types import SimpleNamespace

import numpy as np
from engine_util import (
    ROUND,
    UNEVEN_DRAFTS,
    FixedDraftLengths,
    demo_engine,
    patch_kernel_source,
    skip_warm_up,
)
from reference_round import Tree
from round_simulator import publish_slots, write_draft_tree
from sampling_round import open_round

from graft.cudagraph.driver.pinned import Ring
from graft.cudagraph.lanes import StreamLane
from graft.grammar.grammar_spec import GrammarSpec
from graft.models.request import Request
from graft.sampling.exchange import Exchange
from graft.sampling.mode import DraftMode
from graft.sampling.state import SLOT, SlotState

SLOTS = 12
REPLAY = 5


def random_slots(rng, max_drafts):
    """Return slots with random draft trees and few distinct acceptance probabilities."""
    slots = np.zeros(SLOTS, SLOT)
    slots["n"] = rng.integers(0, 90, SLOTS)
    slots["last"] = rng.integers(0, 50, SLOTS)
    slots["active"] = rng.random(SLOTS) < 0.8
    num_drafts = rng.integers(0, max_drafts + 1, SLOTS)
    slots["cut"] = 7
    for slot in slots:
        levels = rng.integers(0, 4, len(slot["accept_prob"]))
        slot["accept_prob"] = np.sort(levels)[::-1] / 4
        drafts = rng.integers(0, 50, max_drafts).tolist()
        parents = [int(rng.integers(0, j + 1)) for j in range(max_drafts)]
        write_draft_tree(slot, Tree((int(slot["last"]), *drafts), (-1, *parents)))
    slots["draft_len"] = num_drafts  # entries after these are left from earlier rounds
    return slots


def expected_shares(slots, row_slot, draft_rows):
    """Return the number of drafts of each batch row that get one of `draft_rows` forward rows."""
    drafts = []
    for b, s in enumerate(row_slot):
        if s < 0:
            continue
        for j in range(1, slots[s]["draft_len"] + 1):
            accept_prob = slots[s]["accept_prob"][j - 1]
            drafts.append((-accept_prob, j, b))
    shares = [0] * len(row_slot)
    for _, _, b in sorted(drafts)[:draft_rows]:
        shares[b] += 1
    return shares


def begin(device, stream, slots, input_slots, num_rows, max_drafts, replay=REPLAY):
    """Run the kernel for `num_rows` forward rows with `input_slots` as the input of REPLAY.

    Returns
    -------
    SimpleNamespace
        State of the slots, row map (`first`, `map`, `row_slot`), `rows` (token, slot, position and
        path of each forward row) and the first two words of the `Drafted` records.
    """
    state = SlotState(device, SLOTS, 50)
    exchange = Exchange(device, SLOTS, 50, DraftMode.chain(max_drafts))
    state.copy_from(slots)
    exchange.drafted[:, 0] = 3
    exchange.drafted[:, 1] = slots["draft_len"]
    batch = len(input_slots)
    ring = Ring(device, 2, {"slot": ("int32", (batch,))})
    publish_slots(ring, REPLAY, input_slots)
    number = device.from_host(np.array([replay - 1], np.int32))
    row_slot = device.zeros((batch,), "int32")
    lane = StreamLane(stream)
    row_map, arrays = open_round(device, lane, state, exchange, number, ring, row_slot, num_rows)
    stream.synchronize()
    assert number.to_host() == [replay]
    ring.release(REPLAY)
    return SimpleNamespace(
        slots=state.to_host(),
        first=row_map.first.to_host(),
        map=row_map.map.to_host(),
        row_slot=row_map.slot.to_host(),
        rows=[array.to_host() for array in arrays],
        drafted=exchange.drafted[:, :2].copy(),
    )


def check_rows(result, slots, row_slot, shares):
    """Assert that the row map and the rows are those of the assignment."""
    rows_per_request = [1 + share for share in shares]
    first = np.cumsum([0, *rows_per_request[:-1]])
    np.testing.assert_array_equal(result.first, first)
    row = np.arange(len(result.map))
    batch_row = np.searchsorted(first, row, "right") - 1
    np.testing.assert_array_equal(result.map, batch_row << 16 | (row - first[batch_row]))
    for r, b in enumerate(batch_row):
        j = r - first[b]
        found = tuple(array[r] for array in result.rows)
        if row_slot[b] < 0 or j > shares[b]:
            assert found == (0, -1, -1, 0)
            continue
        slot = slots[row_slot[b]]
        token = slot["last"]
        path = 0
        if j:
            token = slot["drafts"][j - 1]
            path = int(slot["path"][j - 1])
        assert found == (token, row_slot[b], slot["n"] + path.bit_count(), path)


def test_round_begin_assigns_rows_by_acceptance(device, stream):
    """The last token of each request gets a row; the other rows go to the likeliest drafts.

    Of drafts with equal acceptance probability, the one with fewer drafts before it in its slot is
    preferred. Drafts without a row are cut, and the ``Drafted`` record that the grammar worker
    reads is shortened.
    """
    rng = np.random.default_rng(3)
    num_cut = 0
    for _ in range(60):
        max_drafts = int(rng.choice([1, 3, 7, 60]))
        batch = int(rng.integers(1, SLOTS + 1))
        slots = random_slots(rng, max_drafts)
        input_slots = np.where(
            rng.random(batch) < 0.85,
            rng.permutation(SLOTS)[:batch],
            rng.choice([-1, SLOTS, -7], batch),
        )
        draft_rows = int(rng.integers(0, batch * max_drafts + 1))
        row_slot = [s if 0 <= s < SLOTS and slots[s]["active"] else -1 for s in input_slots]
        shares = expected_shares(slots, row_slot, draft_rows)
        result = begin(device, stream, slots, input_slots, batch + draft_rows, max_drafts)
        wanted = slots.copy()
        for share, s in zip(shares, row_slot, strict=True):
            if s < 0:
                continue
            wanted[s]["cut"] = slots[s]["draft_len"] - share
            wanted[s]["draft_len"] = share
            num_cut += wanted[s]["cut"] > 0
        np.testing.assert_array_equal(result.slots, wanted)
        np.testing.assert_array_equal(result.drafted[:, 1], wanted["draft_len"])
        assert (result.drafted[:, 0] == 3).all()
        assert result.row_slot.tolist() == row_slot
        check_rows(result, slots, row_slot, shares)
    assert num_cut > 30


def test_round_begin_without_published_entry_is_padding(device, stream):
    """If the input entry is of another replay, all rows are padding and slots do not change."""
    slots = random_slots(np.random.default_rng(2), 3)
    result = begin(device, stream, slots, range(4), 6, 3, replay=REPLAY + 2)
    np.testing.assert_array_equal(result.slots, slots)
    assert (result.row_slot == -1).all()
    assert (result.rows[1] == -1).all()
    assert result.first.tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(result.drafted[:, 1], slots["draft_len"])


def test_cut_drafts_get_no_mask_rows(monkeypatch):
    """If drafts are cut, the grammar worker fills mask rows for the verified rows only."""
    patch_kernel_source(monkeypatch, ROUND, *UNEVEN_DRAFTS)
    skip_warm_up(monkeypatch)
    words = GrammarSpec.regex("([a-z]{1,5} )+")
    requests = [Request(tokens=[300 + i], grammar=words, max_tokens=30) for i in range(2)]
    with demo_engine(draft_length="auto", max_batch_size=2, draft_masking="none") as engine:
        engine._scheduler.budget = FixedDraftLengths(itertools.repeat(1))
        rows = []
        engine._replays.on_row = lambda state, row: rows.append(row)
        engine.generate(requests)
        grammar = engine.counters()["grammar"]
    num_verified = sum(1 + row.tested for row in rows if row.tokens)
    assert 0 < grammar["fills"] <= num_verified
    assert {row.tested for row in rows if row.cut} >= {0, 1, 2}
    assert not grammar["desyncs"]
