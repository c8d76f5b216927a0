"""Copies of mask rows to device memory."""

from __future__ import annotations

import numpy as np
import pytest
import reference_round as ref

from graft.cudagraph.errors import OptionError

DRAFTS = 2
SLOTS = 5


@pytest.mark.parametrize("vocab", [45, 70_000])
def test_copy_mask_rows_copies_filled_rows_of_batch(make_round, block, vocab):
    """Filled rows of the batch's slots are copied; all other rows on the device keep their bits."""
    rng = np.random.default_rng(vocab)
    r = make_round(slots=SLOTS, draft_length=DRAFTS, vocab=vocab, block=block)
    states = rng.permutation(np.resize([ref.READY, ref.READY, ref.FREE, ref.NOT_READY], 15))
    states = states.reshape(SLOTS, DRAFTS + 1)
    for (slot, j), state in np.ndenumerate(states):
        r.write_mask(slot, j, ref.MaskRow(int(state), 1, 5 + j, rng.random(vocab) < 0.5))
    wanted = r.exchange.device_masks.to_host()
    batch = np.array([3, -1, 0, 4], np.int32)
    row_slot = r.device.from_host(batch)
    for first, end in ((1, 2), (0, DRAFTS + 1)):
        r.sampler.mask_rows.copy_to_device(r.lane, row_slot, first, end)
        r.stream.synchronize()
        for slot in batch:
            for j in range(first, end):
                if slot >= 0 and states[slot, j] == ref.READY:
                    wanted[j, slot] = r.exchange.masks[slot, j]
        np.testing.assert_array_equal(r.exchange.device_masks.to_host(), wanted)


@pytest.mark.parametrize(("first", "end"), [(-1, 1), (1, 1), (0, DRAFTS + 2)])
def test_copy_mask_rows_rejects_rows_that_do_not_exist(make_round, first, end):
    r = make_round(slots=SLOTS, draft_length=DRAFTS, vocab=45)
    with pytest.raises(OptionError, match=r"first|end"):
        r.sampler.mask_rows.copy_to_device(r.lane, r.row_slot, first, end)
