"""What the device keeps per slot from one replay to the next."""

from __future__ import annotations

from collections.abc import Sequence

from graft.cudagraph.device import Device
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.sampling.checks import check_range
from graft.sampling.loading import load

__all__ = ["COUPLED", "MAX_STOP_IDS", "REJECTION", "SlotState"]

MAX_STOP_IDS = 8
REJECTION = 0
COUPLED = 1


class SlotState:
    """Per-slot state of the round, as device arrays indexed by slot.

    Parameters
    ----------
    device : Device
    slots : int
        S, the largest number of requests at once.
    draft_length : int
        K >= 0, the most drafts of a round.
    draft_vocab : int
        Vd, columns of the drafter's logits (at least 1).

    Attributes
    ----------
    n, last : int32 [S]
        Position of the last committed token, and that token.
    drafts : int32 [S, max(K, 1)]
        Drafts (target ids) that the next round tests; the first ``draft_len`` are valid.
    draft_len, active, epoch : int32 [S]
    limit : int32 [S]
        Exclusive end position: tokens are produced at positions below it.
    stop_ids, stop_count : int32 [S, 8], int32 [S]
    seed : uint64 [S]
    sample : int32 [S]
        Index of the sample among those drawn with one seed.
    temperature, top_p, min_p : float32 [S]; top_k : int32 [S]
        Filters; below 1e-5 the temperature means greedy. Off: top_k 0, top_p 1, min_p 0.
    verify : int32 [S]
        0 rejection sampling, 1 coupled.
    q, q_kind : float32 [S, max(K, 1), Vd], int32 [S, max(K, 1)]
        The table each draft was drawn from (draft-vocabulary columns), and whether it is used:
        0 DENSE, 1 POINT (a point mass).
    faults : int32 [1]
        Drafts whose own table gave them probability zero; always 0 unless something is broken.
    """

    def __init__(self, device: Device, slots: int, draft_length: int, draft_vocab: int) -> None:
        check_range("slots", slots, 1, 1 << 16)
        check_range("draft_length", draft_length, 0, 64)
        check_range("draft_vocab", draft_vocab, 1, (1 << 24) - 1)
        self.device = device
        self.slots = slots
        self.draft_length = draft_length
        self.draft_vocab = draft_vocab
        width = max(draft_length, 1)
        self.n = device.zeros((slots,), "int32")
        self.last = device.zeros((slots,), "int32")
        self.drafts = device.zeros((slots, width), "int32")
        self.draft_len = device.zeros((slots,), "int32")
        self.active = device.zeros((slots,), "int32")
        self.epoch = device.zeros((slots,), "int32")
        self.limit = device.zeros((slots,), "int32")
        self.stop_ids = device.zeros((slots, MAX_STOP_IDS), "int32")
        self.stop_count = device.zeros((slots,), "int32")
        self.seed = device.zeros((slots,), "uint64")
        self.sample = device.zeros((slots,), "int32")
        self.temperature = device.zeros((slots,), "float32")
        self.top_k = device.zeros((slots,), "int32")
        self.top_p = device.zeros((slots,), "float32")
        self.min_p = device.zeros((slots,), "float32")
        self.verify = device.zeros((slots,), "int32")
        self.q = device.zeros((slots, width, draft_vocab), "float32")
        self.q_kind = device.zeros((slots, width), "int32")
        self.faults = device.zeros((1,), "int32")
        kernels = load(device, "slot", 1)
        self._join, self._leave = kernels["slot_join"], kernels["slot_leave"]

    def join(
        self,
        lane: Lane,
        slot: int,
        *,
        position: int,
        last: int,
        epoch: int,
        limit: int,
        stop_ids: Sequence[int] = (),
        seed: int = 0,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        verify: int = REJECTION,
        sample: int = 0,
    ) -> None:
        """Give a slot to a request: active, without drafts.

        The values travel as kernel arguments: a later call cannot change an earlier launch. The
        caller has computed the target's KV below ``position``; the next round feeds ``last`` at
        ``position`` and samples the token after it.

        Parameters
        ----------
        lane : Lane
        slot : int
        position, last : int
            Position of the last prompt token, and that token.
        epoch : int
            Generation of the slot; mask rows carry it.
        limit : int
            Exclusive end position of the request.
        stop_ids : sequence of int
            Up to 8 ids that end the request.
        seed : int
            64-bit seed; any int, taken modulo 2**64.
        temperature, top_k, top_p, min_p
            Filters, see the class.
        verify : int
            ``REJECTION`` or ``COUPLED``.
        sample : int
            Index among the samples drawn with this seed, 0 <= sample < 2**24.

        Raises
        ------
        OptionError
            Naming the value that is out of range.
        """
        check_range("slot", slot, 0, self.slots - 1)
        check_range("position", position, 0, 2**31 - 2)
        check_range("limit", limit, position + 2, 2**31 - 1)
        check_range("temperature", temperature, 0.0, 1e6)
        check_range("top_k", top_k, 0, 2**31 - 1)
        check_range("top_p", top_p, 0.0, 1.0)
        check_range("min_p", min_p, 0.0, 1.0)
        check_range("verify", verify, REJECTION, COUPLED)
        check_range("sample", sample, 0, 2**24 - 1)
        if len(stop_ids) > MAX_STOP_IDS:
            raise OptionError(f"at most {MAX_STOP_IDS} stop ids, got {len(stop_ids)}")
        stops = [int(i) for i in stop_ids] + [-1] * (MAX_STOP_IDS - len(stop_ids))
        lane.kernel(
            self._join,
            1,
            1,
            [
                slot, position, last, epoch, limit, len(stop_ids), *stops, seed % 2**64, sample,
                float(temperature), top_k, float(top_p), float(min_p), verify,
                self.n, self.last, self.draft_len, self.active, self.epoch, self.limit,
                self.stop_ids, self.stop_count, self.seed, self.sample, self.temperature,
                self.top_k, self.top_p, self.min_p, self.verify,
            ],
            name=f"join slot {slot}",
        )  # fmt: skip

    def leave(self, lane: Lane, slot: int) -> None:
        """Make a slot inactive; later rounds neither read nor write it.

        Raises
        ------
        OptionError
            When there is no such slot.
        """
        check_range("slot", slot, 0, self.slots - 1)
        lane.kernel(
            self._leave, 1, 1, [slot, self.active, self.draft_len], name=f"leave slot {slot}"
        )
