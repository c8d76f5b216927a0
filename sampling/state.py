"""Device memory of the request slots: the state that is kept from one round to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graft.cudagraph.device import Device
from graft.cudagraph.driver.cstruct import read_numbers, read_struct
from graft.cudagraph.driver.memory import PinnedArray
from graft.cudagraph.lanes import Lane
from graft.sampling.checks import check_range
from graft.sampling.kernels.loader import KERNELS, load
from graft.sampling.params import VERIFY_MODES, SamplingParams

__all__ = ["LOGPROBS", "MAX_DRAFTS", "SLOT", "SlotRequest", "SlotState"]

_HEADER = KERNELS / "slot.cuh"
_NUMBERS = read_numbers(_HEADER)
MAX_DRAFTS = _NUMBERS["MAX_DRAFTS"]
#: dtype of ``struct Slot`` in kernels/slot.cuh, which documents its fields.
SLOT = read_struct(_HEADER, "Slot")
#: dtype of ``struct Logprobs`` in kernels/slot.cuh.
LOGPROBS = read_struct(_HEADER, "Logprobs")


@dataclass(frozen=True, kw_only=True)
class SlotRequest:
    """The data of a request that `SlotState.join` writes to a slot.

    Attributes
    ----------
    position
        Position of the last known token, which is the last one of `prompt` and `output`.
    last
        Id of that token.
    epoch
        Number of the slot assignment. Stamps of mask rows contain it, so that kernels ignore the
        rows of the slot's previous request.
    limit
        Exclusive upper bound of the request's positions.
    capacity
        Exclusive upper bound of the positions with KV-cache pages. Default: `limit`. Draft j of a
        tree is cached at position n + j, whatever its depth, so a greater capacity allows more
        drafts when the request is near its limit.
    prompt, output
        Token ids of the prompt and of the output so far, for penalties and `min_tokens`.
    """

    params: SamplingParams
    position: int
    last: int
    epoch: int
    limit: int
    capacity: int | None = None
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()

    def check(self) -> None:
        """Raise OptionError if `position`, `limit` or `capacity` is out of range.

        The sampling parameters were checked when the request was admitted.
        """
        check_range("position", self.position, 0, 2**31 - 2)
        check_range("limit", self.limit, self.position + 2, 2**31 - 1)
        if self.capacity is not None:
            check_range("capacity", self.capacity, self.limit, 2**31 - 1)

    def record(self) -> Any:
        """Return the slot for this request, active and without drafts; the dtype is `SLOT`."""
        record = _params_record(self.params)
        record["n"] = self.position
        record["last"] = self.last
        record["active"] = 1
        record["epoch"] = self.epoch
        record["limit"] = self.limit
        record["capacity"] = self.limit if self.capacity is None else self.capacity
        if self.params.min_tokens > 0:
            num_prompt = self.position + 1 - len(self.output)
            record["earliest_stop"] = min(num_prompt + self.params.min_tokens, self.limit)
        return record


class SlotState:
    """Device array with one ``struct Slot`` per request slot.

    Attributes
    ----------
    array
        uint8 [S, SLOT.itemsize]; the type of the kernels' argument is ``Slot*``.
    tables
        int32 [S, 2, V], logit bias and token counts in the layout of
        `SamplingParams.write_logit_table`. Undefined for requests without bias and penalties.
    """

    def __init__(self, device: Device, slots: int, vocab_size: int) -> None:
        check_range("slots", slots, 1, 1 << 16)
        self.device = device
        self.slots = slots
        self.vocab_size = vocab_size
        self.tables = device.zeros((slots, 2, vocab_size), "int32")
        # Pinned memory from which `join` copies a request's table to `tables`. It is allocated here
        # for all slots: a failed allocation in `join` would fail all running requests.
        self._staged: PinnedArray = device.pinned((slots, 2, vocab_size), "int32")
        self.array = device.zeros((slots, SLOT.itemsize), "uint8")
        kernels = load(device, "slot", 1)
        self._join = kernels["slot_join"]
        self._leave = kernels["slot_leave"]

    def to_host(self) -> NDArray:
        """Wait until the device is idle, then return a copy of all slots with the dtype `SLOT`."""
        return self.array.to_host().view(SLOT)[:, 0]

    def copy_from(self, slots: NDArray) -> None:
        """Wait until the device is idle, then overwrite all slots; `slots` has the dtype `SLOT`."""
        self.array.copy_from(np.ascontiguousarray(slots)[:, None].view(np.uint8))

    def join(self, lane: Lane, slot: int, request: SlotRequest) -> None:
        """Assign a slot to a request: mark it active, without drafts.

        The target's KV cache must have the entries of all positions below ``request.position``. The
        next round feeds ``request.last`` at this position and samples the token at the position
        after it.

        The request is passed to the kernel by value, so later changes on the host do not affect it.
        The exception is the table of logit bias and token counts, which is copied from pinned
        memory that belongs to the slot. Do not call `join` again for a slot before the previous
        `join` of the slot has completed on the device.
        """
        check_range("slot", slot, 0, self.slots - 1)
        request.check()
        params = request.params
        if params.has_bias or params.has_penalties:
            first = slot * 2 * self.vocab_size
            staged = self._staged.view(first, (2, self.vocab_size))
            params.write_logit_table(staged.array, request.prompt, request.output)
            lane.copy(self.tables[slot], staged, name=f"table of slot {slot}")
        args = [self.array, slot, request.record()[()]]
        lane.kernel(self._join, 1, 1, args, name=f"join slot {slot}")

    def leave(self, lane: Lane, slot: int) -> None:
        """Deactivate a slot, so that later rounds neither read nor write it."""
        check_range("slot", slot, 0, self.slots - 1)
        lane.kernel(self._leave, 1, 1, [self.array, slot], name=f"leave slot {slot}")


def _params_record(params: SamplingParams) -> Any:
    """Return a record of dtype SLOT that has the sampling parameters, and zeros elsewhere."""
    record = np.zeros((), SLOT)
    relaxed = params.relaxed
    relaxed_until = -1 if relaxed.until is None else relaxed.until
    stop_ids = params.stop_ids or ()
    values = {
        "verify": VERIFY_MODES.index(params.verify or "rejection"),
        "sample": params.sample,
        "seed": params.seed or 0,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "top_k": params.top_k,
        "num_stop_ids": len(stop_ids),
        "adjust": _adjust_flags(params),
        "logprobs": params.logprobs or 0,
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
        "repetition": params.repetition_penalty,
        "relaxed_k": relaxed.top_k,
        "relaxed_delta": relaxed.delta,
        "relaxed_until": relaxed_until,
    }
    for name, value in values.items():
        record[name] = value
    record["stop_ids"][: len(stop_ids)] = stop_ids
    return record


def _adjust_flags(params: SamplingParams) -> int:
    """Return the ``ADJUST_*`` bits of ``Slot.adjust``."""
    wants_logprobs = params.logprobs is not None
    flags = {
        "ADJUST_BIAS": params.has_bias,
        "ADJUST_COUNTS": params.has_penalties,
        "ADJUST_STOPS": params.min_tokens > 0,
        "ADJUST_LOGPROBS": wants_logprobs,
        "ADJUST_MASKED": wants_logprobs and params.logprobs_masked,
    }
    return sum(_NUMBERS[name] for name, is_set in flags.items() if is_set)
