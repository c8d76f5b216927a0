"""Assignment of forward rows to drafts: the kernel `round_begin`, compared with a reference."""

import itertools
from types import SimpleNamespace

import numpy as np
from engine_util import ROUND, UNEVEN_DRAFTS, FixedDraftLengths, demo_engine, patch_kernel_source
from sampling_round import open_round

from graft.cudagraph.lanes import StreamLane
from graft.cudagraph.pinned import Ring
from graft.grammar.grammar_spec import GrammarSpec
from graft.models.request import Request
from graft.sampling.exchange import Exchange
from graft.sampling.mode import DraftMode
from graft.sampling.state import SLOT, SlotState

SLOTS = 9
REPLAY = 5


def random_slots(rng, most):
    """Return slots with up to `most` drafts of a tree and few distinct acceptance probabilities."""
    slots = np.zeros(SLOTS, SLOT)
    slots["n"], slots["last"] = rng.integers(0, 90, SLOTS), rng.integers(0, 50, SLOTS)
    slots["active"], slots["draft_len"] = rng.random(SLOTS) < 0.8, rng.integers(0, most + 1, SLOTS)
    slots["cut"] = 7
    for slot in slots:
        slot["accept_prob"] = np.sort(rng.integers(0, 4, len(slot["accept_prob"])))[::-1] / 4
        slot["drafts"][:most] = rng.integers(0, 50, most)
        for j in range(most):
            slot["parent"][j] = on = rng.integers(0, j + 1)
            slot["path"][j] = (slot["path"][on - 1] if on else np.uint64(0)) | np.uint64(1 << j)
    return slots


def shares(slots, row_slot, places):
    """Return the number of drafts of each batch row that get a forward row."""
    every = [
        (-slots[s]["accept_prob"][j - 1], j, b)
        for b, s in enumerate(row_slot)
        if s >= 0
        for j in range(1, slots[s]["draft_len"] + 1)
    ]
    kept = sorted(every)[:places]
    return [sum(b == row for *_, b in kept) for row in range(len(row_slot))]


def begin(device, stream, slots, given, count, most, replay=REPLAY):
    """Run the kernel for `count` rows and an input entry of REPLAY with these slots."""
    state = SlotState(device, SLOTS, 50)
    exchange = Exchange(device, SLOTS, 50, DraftMode.chain(most))
    state.copy_from(slots)
    for s in range(SLOTS):
        exchange.drafted[s, :2] = 3, slots["draft_len"][s]
    ring = Ring(device, 2, {"slot": ("int32", (len(given),))})
    ring.reserve(REPLAY)
    ring.row("slot", REPLAY)[:] = given
    ring.publish(REPLAY)
    number = device.from_host(np.array([replay - 1], np.int32))
    row_slot = device.zeros((len(given),), "int32")
    placed, laid = open_round(
        device, StreamLane(stream), state, exchange, number, ring, row_slot, count
    )
    stream.synchronize()
    assert number.to_host() == [replay]
    ring.release(REPLAY)
    return SimpleNamespace(
        slots=state.to_host(),
        first=placed.first.to_host(),
        map=placed.map.to_host(),
        row_slot=placed.slot.to_host(),
        rows=[a.to_host() for a in laid],
        drafted=exchange.drafted[:, :2].copy(),
    )


def test_round_begin_assigns_rows_by_acceptance(device, stream):
    """Every last token has a row; the other rows go to the drafts with the highest acceptance.

    Among equals, earlier drafts are preferred. The others are cut, and the grammar's record is
    shortened.
    """
    rng = np.random.default_rng(3)
    cuts = 0
    for _ in range(120):
        most = int(rng.choice([1, 3, 7]))
        batch = int(rng.integers(1, 9))
        slots = random_slots(rng, most)
        given = np.where(
            rng.random(batch) < 0.85,
            rng.permutation(SLOTS)[:batch],
            rng.choice([-1, SLOTS, -7], batch),
        )
        places = int(rng.integers(0, batch * most + 1))
        seated = [s if 0 <= s < SLOTS and slots[s]["active"] else -1 for s in given]
        kept = shares(slots, seated, places)
        got = begin(device, stream, slots, given, batch + places, most)
        wanted = slots.copy()
        for share, s in zip(kept, seated, strict=True):
            if s >= 0:
                wanted[s]["cut"] = slots[s]["draft_len"] - share
                wanted[s]["draft_len"] = share
                cuts += wanted[s]["cut"] > 0
        np.testing.assert_array_equal(got.slots, wanted)
        np.testing.assert_array_equal(got.drafted[:, 1], wanted["draft_len"])
        assert (got.drafted[:, 0] == 3).all() and got.row_slot.tolist() == seated
        begins = np.cumsum([0, *(1 + share for share in kept[:-1])])
        np.testing.assert_array_equal(got.first, begins)
        row = np.arange(batch + places)
        b = np.searchsorted(begins, row, "right") - 1
        np.testing.assert_array_equal(got.map, b << 16 | (row - begins[b]))
        for r, of in enumerate(b):
            s = seated[of]
            j = r - begins[of]
            laid = tuple(array[r] for array in got.rows)
            if s < 0 or j > kept[of]:
                assert laid == (0, -1, -1, 0)
                continue
            path = int(slots[s]["path"][j - 1]) if j else 0
            token = slots[s]["drafts"][j - 1] if j else slots[s]["last"]
            assert laid == (token, s, slots[s]["n"] + path.bit_count(), path)
    assert cuts > 50


def test_round_begin_without_published_entry_is_padding(device, stream):
    """If the input entry belongs to another replay, rows are padding and slots do not change."""
    slots = random_slots(np.random.default_rng(2), 3)
    got = begin(device, stream, slots, range(4), 6, 3, replay=REPLAY + 2)
    np.testing.assert_array_equal(got.slots, slots)
    assert (got.row_slot == -1).all() and (got.rows[1] == -1).all()
    assert got.first.tolist() == [0, 1, 2, 3] and got.drafted[:, 1].tolist() == list(
        slots["draft_len"]
    )


def test_cut_drafts_get_no_mask_rows(monkeypatch, tmp_path):
    """With cut drafts, each verified row is filled once and no other row is."""
    patch_kernel_source(monkeypatch, tmp_path, ROUND, *UNEVEN_DRAFTS)
    words = GrammarSpec.regex("([a-z]{1,5} )+")
    requests = [Request(tokens=[300 + i], grammar=words, max_tokens=30) for i in range(2)]
    with demo_engine(draft_length="auto", max_batch_size=2, mask_drafts=False) as engine:
        engine._scheduler.budget = FixedDraftLengths(itertools.repeat(1))
        rows = []
        engine._replays.on_row = lambda seat, row: rows.append(row)
        engine.generate(requests)
        grammar = engine.counters()["grammar"]
    assert 0 < grammar["fills"] <= sum(1 + row.tested for row in rows if row.tokens)
    assert {row.tested for row in rows if row.cut} >= {0, 1, 2} and not grammar["desyncs"]
