"""What the device keeps per slot from one replay to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graft.cudagraph.cstruct import read_numbers, read_struct
from graft.cudagraph.device import Device
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import PinnedArray
from graft.sampling.adjust import NOTHING, Adjust
from graft.sampling.checks import check_range
from graft.sampling.loading import KERNELS, load

__all__ = [
    "COUPLED",
    "LOGPROBS",
    "MAX_DRAFTS",
    "MAX_LOGPROBS",
    "MAX_STOP_IDS",
    "PER_TOKEN",
    "REJECTION",
    "RELAXED",
    "Relaxed",
    "SLOT",
    "SlotState",
]

_HEADER = KERNELS / "slot.cuh"
_NUMBERS = read_numbers(_HEADER)
MAX_STOP_IDS = _NUMBERS["MAX_STOP_IDS"]
MAX_DRAFTS = _NUMBERS["MAX_DRAFTS"]
MAX_LOGPROBS = _NUMBERS["MAX_LOGPROBS"]
REJECTION = _NUMBERS["VERIFY_REJECTION"]
COUPLED = _NUMBERS["VERIFY_COUPLED"]
PER_TOKEN = _NUMBERS["VERIFY_PER_TOKEN"]
RELAXED = _NUMBERS["VERIFY_RELAXED"]
#: ``struct Slot`` of sampling/kernels/slot.cuh, where its fields are explained.
SLOT = read_struct(_HEADER, "Slot")
#: ``struct Logprobs`` of the same.
LOGPROBS = read_struct(_HEADER, "Logprobs")


@dataclass(frozen=True)
class Relaxed:
    """When a draft is accepted that is not the target's own token. The output is then not exact.

    Probabilities are the target's, masked and filtered; for greedy requests masked, at temperature
    1. Drafts are accepted among the ids that a grammar allows and no others.

    Parameters
    ----------
    top_k : it is among so many best ids.
    delta : its probability is at most so far below the best id's.
    until : id behind which nothing is relaxed, such as the end of a reasoning section.
    """

    top_k: int = 10
    delta: float = 0.6
    until: int | None = None


class SlotState:
    """One ``Slot`` per request, in device memory.

    Parameters
    ----------
    slots : S, the largest number of requests at once.
    vocab_size : V, ids of the target.

    Attributes
    ----------
    array : uint8 [S, SLOT.itemsize], as kernels take it.
    tables : int32 [S, 2, V], bias and counts, see kernels/adjust.cu; of requests that have any.
    """

    def __init__(self, device: Device, slots: int, vocab_size: int) -> None:
        check_range("slots", slots, 1, 1 << 16)
        self.device = device
        self.slots = slots
        self.vocab_size = vocab_size
        self.tables = device.zeros((slots, 2, vocab_size), "int32")
        self._staged: dict[int, PinnedArray] = {}  # rewritten for a slot's next owner only
        self.array = device.zeros((slots, SLOT.itemsize), "uint8")
        kernels = load(device, "slot", 1)
        self._join = kernels["slot_join"]
        self._leave = kernels["slot_leave"]

    def to_host(self) -> NDArray:
        """A copy as SLOT [S]; waits for the device."""
        return self.array.to_host().view(SLOT)[:, 0]

    def copy_from(self, slots: NDArray) -> None:
        """Set every slot from SLOT [S]; waits for the device."""
        self.array.copy_from(np.ascontiguousarray(slots)[:, None].view(np.uint8))

    def join(
        self,
        lane: Lane,
        slot: int,
        *,
        position: int,
        last: int,
        epoch: int,
        limit: int,
        room: int | None = None,
        stop_ids: Sequence[int] = (),
        seed: int = 0,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        verify: int = REJECTION,
        sample: int = 0,
        relaxed: Relaxed = Relaxed(),
        adjust: Adjust = NOTHING,
    ) -> None:
        """Give a slot to a request: active, without drafts.

        The values travel as a kernel argument: a later call cannot change an earlier launch. The
        caller has computed the target's KV below ``position``; the next round feeds ``last`` at
        ``position`` and samples the token after it.

        Parameters
        ----------
        position, last : position of the last prompt token, and that token.
        epoch : generation of the slot; mask rows carry it.
        limit : exclusive end position of the request.
        room : positions that it may have pages for, where drafts that branch need more than
            `limit`.
        stop_ids : up to 64 ids that end the request.
        seed : 64 bits; any int, taken modulo 2**64.
        temperature, top_k, top_p, min_p : filters; below 1e-5 the temperature means greedy. Off:
            top_k 0, top_p 1, min_p 0.
        verify : ``REJECTION``, ``COUPLED``, ``PER_TOKEN`` or ``RELAXED``.
        sample : index among the samples drawn with this seed, 0 <= sample < 2**24.
        relaxed : of a ``RELAXED`` request.
        adjust : bias, penalties and log probabilities; its table follows in pinned memory that this
            slot keeps, so a slot is joined again only when an earlier join is over.

        Raises
        ------
        OptionError
            Naming the value that is out of range.
        """
        check_range("slot", slot, 0, self.slots - 1)
        check_range("position", position, 0, 2**31 - 2)
        check_range("limit", limit, position + 2, 2**31 - 1)
        room = limit if room is None else room
        check_range("room", room, limit, 2**31 - 1)
        check_range("temperature", temperature, 0.0, 1e6)
        check_range("top_k", top_k, 0, 2**31 - 1)
        check_range("top_p", top_p, 0.0, 1.0)
        check_range("min_p", min_p, 0.0, 1.0)
        check_range("verify", verify, REJECTION, RELAXED)
        check_range("sample", sample, 0, 2**24 - 1)
        check_range("relaxed.top_k", relaxed.top_k, 1, 2**31 - 1)
        check_range("relaxed.delta", relaxed.delta, 0.0, 1.0)
        check_range("logprobs", adjust.logprobs or 0, 0, min(MAX_LOGPROBS, self.vocab_size))
        if len(stop_ids) > MAX_STOP_IDS:
            raise OptionError(f"at most {MAX_STOP_IDS} stop ids, got {len(stop_ids)}")
        request = np.zeros((), SLOT)
        for name, value in {
            "n": position,
            "last": last,
            "active": 1,
            "epoch": epoch,
            "limit": limit,
            "room": room,
            "verify": verify,
            "sample": sample,
            "seed": seed % 2**64,
            "temperature": temperature,
            "top_p": top_p,
            "min_p": min_p,
            "top_k": top_k,
            "stops": len(stop_ids),
            "adjust": _NUMBERS["ADJUST_BIAS"] * adjust.biased
            | _NUMBERS["ADJUST_COUNTS"] * adjust.counted
            | _NUMBERS["ADJUST_STOPS"] * (adjust.earliest > 0)
            | _NUMBERS["ADJUST_LOGPROBS"] * (adjust.logprobs is not None)
            | _NUMBERS["ADJUST_MASKED"] * (adjust.logprobs is not None and adjust.masked),
            "earliest": adjust.earliest,
            "logprobs": adjust.logprobs or 0,
            "presence": adjust.presence,
            "frequency": adjust.frequency,
            "repetition": adjust.repetition,
            "relaxed_k": relaxed.top_k,
            "relaxed_delta": relaxed.delta,
            "relaxed_until": -1 if relaxed.until is None else relaxed.until,
        }.items():
            request[name] = value
        request["stop_ids"][: len(stop_ids)] = stop_ids
        if adjust.biased or adjust.counted:
            if slot not in self._staged:
                self._staged[slot] = self.device.pinned((2, self.vocab_size), "int32")
            adjust.write(self._staged[slot].array)
            lane.copy(self.tables[slot], self._staged[slot], name=f"table of slot {slot}")
        args = [self.array, slot, request[()]]
        lane.kernel(self._join, 1, 1, args, name=f"join slot {slot}")

    def leave(self, lane: Lane, slot: int) -> None:
        """Make a slot inactive; later rounds neither read nor write it.

        Raises
        ------
        OptionError
            When there is no such slot.
        """
        check_range("slot", slot, 0, self.slots - 1)
        lane.kernel(self._leave, 1, 1, [self.array, slot], name=f"leave slot {slot}")
