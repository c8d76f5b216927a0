"""Verification of drafts that are given as plain arrays, with the kernels of the engine."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graft.cudagraph.device import Device, open_device
from graft.cudagraph.driver.cstruct import read_numbers, read_struct
from graft.cudagraph.driver.dtypes import itemsize
from graft.cudagraph.driver.foreign import read_foreign
from graft.cudagraph.driver.memory import DeviceArray, PinnedArray
from graft.cudagraph.errors import OptionError, ShapeError
from graft.cudagraph.lanes import Lane, StreamLane
from graft.sampling.arrays import SamplingArrays
from graft.sampling.checks import check_range, check_real, expect
from graft.sampling.exchange import Exchange
from graft.sampling.kernels.loader import KERNELS, load
from graft.sampling.mode import DraftMode
from graft.sampling.params import SamplingParams
from graft.sampling.rows import DraftVocab, RowMap
from graft.sampling.sampler import Sampler
from graft.sampling.state import MAX_DRAFTS, SlotRequest, SlotState

__all__ = ["VERIFY_DRAFTS_MODES", "DraftVerifier", "verify_drafts"]

#: Values of `mode` of `verify_drafts` and `DraftVerifier`.
VERIFY_DRAFTS_MODES = ("greedy", "rejection", "per_token", "coupled")

_SOURCE = KERNELS / "given_drafts.cu"
_CODES = read_numbers(_SOURCE)
_FAULT = read_struct(_SOURCE, "GivenFault")
#: Smallest temperature of a request that is not greedy.
_MIN_TEMPERATURE = 1e-5
#: Exclusive upper bound of positions; the kernels accept positions below it.
_LIMIT = 2**31 - 1
_MAX_BATCH = (1 << 15) - 1  # of `SamplingArrays`
_INTEGERS = ("int32", "int64")


class DraftVerifier:
    """Adds the verification of given drafts to a stream or a graph.

    A chain of drafts continues each of `batch` sequences. The target model has computed the logits
    of the token after each draft. `add` adds the kernels that decide how many drafts are accepted,
    and choose one more token. All calls of `add` use the same memory, so the work of one verifier
    must run in order. `verify_drafts` does the same for a single call.

    Parameters
    ----------
    batch
        Number B of sequences.
    drafts
        Maximum number K of drafts per sequence, from 0 to 64.
    vocab_size
        Number V of token ids, which is the number of columns of the logits.
    mode
        "greedy"
            Each token is the one with the largest logit. A draft is accepted if it is this token.
        "rejection"
            Tokens are sampled. The drafts were sampled from `q`, and rejection sampling accepts as
            many as possible (block verification).
        "per_token"
            As "rejection", but each draft is tested separately.
        "coupled"
            The target samples a token at each position, with random numbers that depend only on
            seed and position. A draft is accepted if it equals the token at its position.
    temperature, top_k, top_p, min_p
        Sampling parameters, as in `SamplingParams`. Mode "greedy" does not use them.

    Attributes
    ----------
    tokens
        int32 [B, K + 1] on the device, result of `add`: the accepted drafts of each sequence and
        one token that the target has chosen. The rest of a row is -1. If an input of a sequence is
        invalid, its row has no tokens.
    """

    def __init__(
        self,
        device: Device,
        *,
        batch: int,
        drafts: int,
        vocab_size: int,
        mode: str,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> None:
        if mode not in VERIFY_DRAFTS_MODES:
            allowed = ", ".join(map(repr, VERIFY_DRAFTS_MODES))
            raise OptionError(f"mode must be one of {allowed}, got {mode!r}", param="mode")
        params = SamplingParams()
        if mode != "greedy":
            check_real("temperature", temperature, _MIN_TEMPERATURE, 1e4)
            params = SamplingParams(
                temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, verify=mode
            )
        check_range("batch", batch, 1, _MAX_BATCH)
        check_range("drafts", drafts, 0, MAX_DRAFTS)
        params.check(vocab_size)
        self.device = device
        self.mode = mode
        self.batch = batch
        self.drafts = drafts
        self.vocab_size = vocab_size
        request = SlotRequest(params=params, position=0, last=0, epoch=1, limit=_LIMIT)
        self._request = request.record()[()]
        self._uses_q = mode in ("rejection", "per_token")
        exchange = Exchange(device, batch, vocab_size, DraftMode.chain(drafts, "none"))
        for slot in range(batch):
            exchange.free_rows(slot, request.epoch)
        self._arrays = SamplingArrays(
            SlotState(device, batch, vocab_size),
            exchange,
            device.zeros((1,), "int32"),
            token_limit=vocab_size,
            max_batch=batch,
            draft_vocab=DraftVocab(vocab_size if self._uses_q and drafts > 0 else 0),
        )
        self._sampler = Sampler(self._arrays)
        kernels = load(device, _SOURCE.stem, self._arrays.block)
        self._load = kernels["load_given_drafts"]
        self._write = kernels["write_given_tokens"]
        row, j = np.indices((batch, drafts + 1), np.int32)
        self._rows = RowMap(
            device.from_host(np.arange(batch, dtype=np.int32)),
            device.from_host(np.arange(batch, dtype=np.int32) * np.int32(drafts + 1)),
            device.from_host((row << 16 | j).ravel()),
        )
        self._faults = device.zeros((batch, _FAULT.itemsize), "uint8")
        self.tokens = device.zeros((batch, drafts + 1), "int32")

    def add(
        self,
        lane: Lane,
        logits: Any,
        drafts: Any = None,
        q: Any = None,
        *,
        seeds: Any = None,
        positions: Any = None,
    ) -> None:
        """Add the kernels that verify drafts and write `tokens`.

        The kernels read the arrays in place. Arrays of other libraries, such as CuPy and torch, are
        wrapped with `Device.wrap`, which waits for their stream. If an array is used in several
        calls, wrap it once and pass the result. `check` reports invalid values, which the kernels
        find.

        Parameters
        ----------
        logits
            float32 [B, K + 1, V]. Row j has the target's logits of the token after draft j, row 0
            those of the first token. Illegal tokens have the logit -inf, see `MaskApply`.
        drafts
            int32 or int64 [B, K], token ids. -1 ends the drafts of a sequence, so that it has fewer
            than K. Whether a sequence has a draft j may depend on the tokens before it, but not on
            the token that was sampled as draft j: dropping unlikely drafts changes the
            distribution. None if K is 0.
        q
            float32 [B, K, V], the distribution from which each draft was sampled, in the modes
            "rejection" and "per_token". None: the drafts were not sampled from a distribution, for
            example because they are the best tokens of a drafter; they are then verified as in the
            mode "coupled". The other modes do not read it.
        seeds
            uint64 or int64 [B], seed of the random numbers of each sequence. Not needed in mode
            "greedy".
        positions
            int32 or int64 [B], position in the sequence of the token that row 0 of the logits
            determines, from 1. The random numbers depend on seed and position, so a sequence with
            one seed must not use a position for two decisions. Not needed in mode "greedy".

        Raises
        ------
        ShapeError
            An array has the wrong shape or dtype.
        OptionError
            An array that the mode needs is missing.
        """
        if not hasattr(lane, "kernel"):
            raise OptionError(f"add() needs a lane, such as StreamLane(stream), not {lane!r}")
        batch, num_drafts, vocab_size = self.batch, self.drafts, self.vocab_size
        given = {"logits": logits, "drafts": drafts, "q": q, "seeds": seeds, "positions": positions}
        logits, drafts, q, seeds, positions = (
            self._wrap(name, array) for name, array in given.items()
        )
        sizes = {"B": batch, "K+1": num_drafts + 1, "V": vocab_size}
        expect("logits", logits, "float32", **sizes)
        if num_drafts > 0:
            _require("drafts", drafts, f"K is {num_drafts}")
            expect("drafts", drafts, _INTEGERS, B=batch, K=num_drafts)
        if self.mode != "greedy":
            for name, array in (("seeds", seeds), ("positions", positions)):
                _require(name, array, f"the mode is {self.mode!r}")
            expect("seeds", seeds, ("uint64", "int64"), B=batch)
            expect("positions", positions, _INTEGERS, B=batch)
        if not self._uses_q or num_drafts == 0:
            q = None
        if q is not None:
            expect("q", q, "float32", B=batch, K=num_drafts, V=vocab_size)
        arrays = self._arrays
        args = [
            self._request,
            drafts if num_drafts > 0 else None,
            0 if drafts is None else itemsize(drafts.dtype),
            num_drafts,
            vocab_size,
            q,
            seeds,
            positions,
            0 if positions is None else itemsize(positions.dtype),
            arrays.state.array,
            arrays.draft_probs,
            self._faults,
        ]
        lane.kernel(self._load, batch, arrays.block, args, name="load drafts")
        shape = (batch * (num_drafts + 1), vocab_size)
        rows: Any = (
            logits.view(0, shape) if isinstance(logits, PinnedArray) else logits.reshape(shape)
        )
        self._sampler.target.sample(lane, rows, self._rows)
        self._sampler.verifier.commit(lane, self._rows)
        results = (arrays.results, arrays.row_words, arrays.row_status)
        args = [batch, num_drafts, *results, self.tokens, self._faults]
        lane.kernel(self._write, -(-batch // 128), 128, args, name="write tokens")

    def _wrap(self, name: str, array: Any) -> Any:
        if array is None:
            return None
        try:
            return self.device.wrap(array)
        except ShapeError as error:
            raise ShapeError(f"{name}: {error}") from error

    def check(self) -> None:
        """Wait until the device is idle, then raise OptionError if an input was invalid.

        The message names the array, the element and the allowed values.
        """
        faults = self._faults.to_host().view(_FAULT)[:, 0]
        invalid = np.flatnonzero(faults["code"])
        if len(invalid) > 0:
            b = int(invalid[0])
            raise OptionError(_describe(b, faults[b], self.vocab_size))


def verify_drafts(
    logits: Any,
    drafts: Any,
    q: Any = None,
    *,
    mode: str,
    seeds: Any = None,
    positions: Any = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[list[int]]:
    """Verify drafts and return the tokens of each sequence.

    The tokens of a sequence are its accepted drafts and one token that the target has chosen. These
    tokens have the same distribution as tokens that the target generates without drafts; in the
    modes "greedy" and "coupled", they are the same tokens. Without drafts (K is 0), one token of
    each sequence is chosen. In this way, a drafter samples drafts with the random numbers that mode
    "coupled" uses for the target.

    The parameters are those of `DraftVerifier` and `DraftVerifier.add`. Arrays may be arrays of
    NumPy, CuPy, torch and other libraries with DLPack, ``__cuda_array_interface__`` or the buffer
    protocol, in host or device memory, and nested lists. For repeated calls, and in graphs, use a
    `DraftVerifier`, which allocates its memory once and copies no arrays.

    Raises
    ------
    ShapeError
        An array has the wrong shape or dtype.
    OptionError
        A parameter or an element of an array is out of range, or a row of `q` does not sum to 1.
    """
    device = open_device()
    stream = device.stream("verify drafts")
    lane = StreamLane(stream)
    logits = _to_device(device, lane, "logits", logits)
    if len(logits.shape) != 3:
        raise ShapeError(f"logits is {list(logits.shape)}, expected float32[B, K + 1, V]")
    batch, width, vocab_size = logits.shape
    if width == 1:
        if drafts is not None and math.prod(np.shape(drafts)) > 0:
            raise ShapeError(
                f"drafts is {list(np.shape(drafts))}, but logits has one row for each sequence, "
                "so there is no draft to verify: pass None, or logits [B, K + 1, V]"
            )
        drafts = q = None
    verifier = DraftVerifier(
        device,
        batch=batch,
        drafts=width - 1,
        vocab_size=vocab_size,
        mode=mode,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    inputs = {"drafts": drafts, "q": q, "seeds": seeds, "positions": positions}
    for name, array in inputs.items():
        if array is not None:
            inputs[name] = _to_device(device, lane, name, array)
    verifier.add(lane, logits, **inputs)
    stream.synchronize()
    verifier.check()
    return [row[row >= 0].tolist() for row in verifier.tokens.to_host()]


def _require(name: str, array: DeviceArray | None, reason: str) -> None:
    if array is None:
        raise OptionError(f"{name} must be given, because {reason}", param=name)


def _to_device(device: Device, lane: StreamLane, name: str, array: Any) -> DeviceArray:
    """Return an array of graft or of another library, or nested lists, as a DeviceArray."""
    if isinstance(array, DeviceArray):
        return array
    found = read_foreign(array, name, lane.handle)
    if found is None:
        return device.from_host(_from_lists(name, array))
    if isinstance(array, np.ndarray):
        return device.from_host(array)
    found.check_contiguous(name)
    copy = device.empty(found.shape, found.dtype)
    lane.copy(copy, array)
    return copy


def _from_lists(name: str, lists: Any) -> np.ndarray:
    """Return nested lists as an array; numbers with a fraction become float32."""
    try:
        array = np.asarray(lists)
    except ValueError:
        raise ShapeError(
            f"{name} has rows of different lengths; fill the rows of drafts up with -1"
        ) from None
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _describe(b: int, fault: Any, vocab_size: int) -> str:
    """Return the error message for an invalid input of sequence b."""
    code = int(fault["code"])
    j = int(fault["j"])
    token = int(fault["token"])
    value = float(fault["value"])
    if code == _CODES["GIVEN_POSITION"]:
        return f"positions[{b}] is {token}, must be from 1 to 2**30 - 1"
    if code == _CODES["GIVEN_ID"]:
        return f"drafts[{b}, {j}] is {token}, must be from 0 to {vocab_size - 1}, or -1: no draft"
    if code == _CODES["GIVEN_GAP"]:
        return f"drafts[{b}, {j}] is {token} after a -1, which ends the drafts of a sequence"
    if code == _CODES["GIVEN_RANGE"]:
        return f"q[{b}, {j}] contains {value:g}, must be from 0 to 1"
    if code == _CODES["GIVEN_SUM"]:
        return f"q[{b}, {j}] has the sum {value:g}, must be 1 up to 0.001"
    if code == _CODES["GIVEN_ZERO"]:
        return f"drafts[{b}, {j}] is {token}, which has probability 0 in q[{b}, {j}]"
    problem = "contains NaN or +inf" if code == _CODES["GIVEN_LOGIT"] else "has no finite logit"
    return f"logits[{b}, {j}] {problem}, so no token can be chosen"
