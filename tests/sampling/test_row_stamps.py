"""Stamps gate everything that reads a mask row: forged ones are worth nothing."""

from __future__ import annotations

import numpy as np
import numpy_sampling as ref
import pytest
from sampling_round import TableRound, pack_bits

V, K, POISON = 16, 3, 13
FORGED = {
    "older epoch": (ref.READY, -1, 0),
    "newer epoch": (ref.READY, 1, 0),
    "position before": (ref.READY, 0, -1),
    "position behind": (ref.READY, 0, 1),
    "row of another draft": (ref.READY, 0, 2),
    "late": (ref.NOT_READY, 0, 0),
    "free, of another request": (ref.FREE, 1, 0),
    "free, elsewhere": (ref.FREE, 0, 1),
    "unknown state": (77, 0, 0),
}
MODES = {
    "greedy": (ref.Filter(0.0), ref.REJECTION),
    "coupled": (ref.Filter(1.0), ref.COUPLED),
    "rejection": (ref.Filter(1.0), ref.REJECTION),
}


def forge(r: TableRound, slot: int, j: int, s: ref.Slot, name: str) -> None:
    """Row j of a slot with a wrong stamp; its mask allows one id that nobody else wants."""
    state, epoch, position = FORGED[name]
    poison = pack_bits(np.arange(V) == POISON)
    r.write_mask(slot, j, ref.MaskRow(state, s.epoch + epoch, s.n + j + position, poison))


def write(r: TableRound, slot: int, j: int, s: ref.Slot) -> None:
    legal = np.arange(V) < 8
    r.write_mask(slot, j, ref.MaskRow(ref.READY, s.epoch, s.n + j, pack_bits(legal)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FORGED)
def test_a_forged_row_is_never_verified_against(device, stream, name, mode):
    """Row 0 forged: the slot sits out unchanged. Row j forged: at most d_1 .. d_j, no bonus."""
    f, verify = MODES[mode]
    logits = np.zeros((K + 1, K + 1, V), np.float32)
    for j in range(K + 1):
        logits[:, j, j] = 30.0  # position n+j+1 wants id j
    q = tuple(np.eye(V)[j] for j in range(K))
    slots = [
        ref.Slot(n=20 + i, last=1, limit=90, seed=5 + i, filter=f, verify=verify, epoch=4,
                 drafts=(0, 1, 2), kinds=(0, 0, 0), q=q)
        for i in range(K + 1)
    ]  # fmt: skip
    r = TableRound(device, stream, slots=K + 1, draft_length=K, vocab=V)
    for i, s in enumerate(slots):
        r.put(i, s)
        for j in range(K + 1):
            write(r, i, j, s)
        forge(r, i, i, s, name)
    out = r.verify(logits)
    assert out["count"].tolist() == [0, 1, 2, 3] and out["accepted"].tolist() == [0, 1, 2, 3]
    assert not (out["tokens"] == POISON).any()
    state = r.snapshot()
    assert state["active"].tolist() == [1] * (K + 1)
    assert (state["n"][0], tuple(state["drafts"][0]), state["draft_len"][0]) == (20, (0, 1, 2), K)


@pytest.mark.parametrize("probing", [False, True], ids=["fill", "probe"])
@pytest.mark.parametrize("name", FORGED)
def test_a_forged_row_is_never_drafted_from(device, stream, name, probing):
    """Drafting ends where the row is another's, as it ends where there is none."""
    r = TableRound(device, stream, slots=3, draft_length=2, vocab=V, candidates=4 * probing)
    slots = [
        ref.Slot(n=9, last=1, limit=90, seed=i, filter=MODES[mode][0], verify=MODES[mode][1],
                 epoch=4)
        for i, mode in enumerate(MODES)
    ]  # fmt: skip
    for i, s in enumerate(slots):
        r.put(i, s)
        write(r, i, 0, s)
    out = r.verify(np.zeros((3, 3, V), np.float32))
    assert out["count"].tolist() == [1] * 3
    for i, s in enumerate(slots):
        forge(r, i, 0, ref.replace(s, n=10), name)
    r.draft(1, np.zeros((3, V), np.float32), masked=True)
    state = r.snapshot()
    assert state["draft_len"].tolist() == [0] * 3


@pytest.mark.parametrize("answer", [(-1, 0), (0, 1), (0, -1), (1, 0)], ids=str)
def test_an_answer_of_another_draft_or_replay_is_never_taken(device, stream, answer):
    """Only {this replay, this draft} counts; without an answer and a row there is no draft."""
    r = TableRound(device, stream, slots=1, draft_length=2, vocab=V, candidates=4)
    s = ref.Slot(n=9, last=1, limit=90, seed=1, filter=ref.Filter(0.0), epoch=4)
    r.put(0, s)
    write(r, 0, 0, s)
    r.verify(np.zeros((1, 3, V), np.float32))
    r.field("row_state")[:] = 0
    r.field("answers")[0] = (r.replay + answer[0], 1 + answer[1], POISON)
    r.draft(1, np.zeros((1, V), np.float32), masked=True)
    assert r.snapshot()["draft_len"][0] == 0
    r.field("answers")[0] = (r.replay, 1, 3)
    r.draft(1, np.zeros((1, V), np.float32), masked=True)
    state = r.snapshot()
    assert (state["draft_len"][0], state["drafts"][0, 0]) == (1, 3)
