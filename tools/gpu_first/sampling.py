"""Sampling state of a decoding round, and the measurement of the sampling kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from graft.cudagraph.lanes import StreamLane
from graft.sampling.arrays import SamplingArrays
from graft.sampling.exchange import NUMBERS, Exchange
from graft.sampling.mode import DraftMode
from graft.sampling.params import SamplingParams
from graft.sampling.results import ROUND_ROW, output_ring
from graft.sampling.rows import RowMap
from graft.sampling.sampler import Sampler
from graft.sampling.state import SlotRequest, SlotState
from graft.tools.gpu_first.session import LIMIT_S, Session

ROW_READY = NUMBERS["ROW_READY"]
BATCH = 8
DRAFTS = 3
ROWS_PER_REQUEST = 1 + DRAFTS
#: Range of the predicted time in microseconds of sampling with filters from the full vocabulary.
PREDICTED_FILTERED_US = (20, 60)


class SamplingSetup:
    """Sampling state of eight requests with three drafts each, as in a decoding round.

    All tokens are legal in the mask rows until `forbid` is called.
    """

    def __init__(self, session: Session):
        vocab = session.shape["vocab_size"]
        self.session = session
        self.state = SlotState(session.device, BATCH, vocab)
        self._replay = session.device.zeros((1,), "int32")
        self._exchange = Exchange(session.device, BATCH, vocab, DraftMode.chain(DRAFTS))
        self._exchange.masks[:] = -1
        self._exchange.stamps["state"] = ROW_READY
        self._exchange.stamps["epoch"] = 1
        self._exchange.stamps["position"] = 8 + np.arange(ROWS_PER_REQUEST)
        arrays = SamplingArrays(
            self.state, self._exchange, self._replay, token_limit=vocab, max_batch=BATCH
        )
        self.sampler = Sampler(arrays)
        self._row_slot = session.device.from_host(np.arange(BATCH, dtype=np.int32))
        self._copy_masks()
        self.ring = output_ring(session.device, 2, BATCH, DRAFTS)

    def _copy_masks(self) -> None:
        lane = StreamLane(self.session.stream)
        self.sampler.mask_rows.copy_to_device(lane, self._row_slot, 0, ROWS_PER_REQUEST)
        self.session.stream.synchronize(LIMIT_S)

    def forbid(self, token: int) -> None:
        """Make a token illegal in the mask rows of all requests."""
        self._exchange.masks[..., token // 32] &= np.int32(~(1 << token % 32))
        self._copy_masks()

    def join(self, params: SamplingParams) -> Any:
        """Assign a request with parameters `params` to each slot; return a host copy of the slots.

        Each slot of the copy also gets a chain of `DRAFTS` drafts; the slots on the device do not.
        """
        request = SlotRequest(params=params, position=8, last=1, epoch=1, limit=1 << 20)
        for slot in range(BATCH):
            self.state.join(StreamLane(self.session.stream), slot, request)
        self.session.stream.synchronize(LIMIT_S)
        slots = self.state.to_host()
        slots["drafts"][:, :DRAFTS] = 1
        slots["q_kind"][:, :DRAFTS] = 1
        slots["parent"][:, :DRAFTS] = (0, 1, 2)
        slots["path"][:, :DRAFTS] = (1, 3, 7)
        slots["draft_len"] = DRAFTS
        return slots

    def first_tokens(self) -> np.ndarray:
        """Return the first token that the last verification committed for each request."""
        header_words = ROUND_ROW.itemsize // 4
        return self.ring["rows"].array[0, :, header_words].copy()

    def row_map(self, requests: int, width: int) -> RowMap:
        """Return the `RowMap` of a forward pass that has `width` rows for each request."""
        device = self.session.device
        batch_rows = np.arange(requests, dtype=np.int32)
        index = np.arange(requests * width, dtype=np.int32)
        return RowMap(
            device.from_host(batch_rows),
            device.from_host(batch_rows * width),
            device.from_host(index // width << 16 | index % width),
        )


def measure_sampling(session: Session) -> None:
    """Measure sampling from the target's logits, greedily and with top-k and top-p."""
    setup = SamplingSetup(session)
    filtered = SamplingParams(temperature=0.8, top_k=50, top_p=0.9)
    for name, params, predicted in (
        ("greedy", SamplingParams(), (5, 20)),
        ("top-k 50, top-p 0.9", filtered, PREDICTED_FILTERED_US),
    ):
        for requests, width in ((1, 1), (8, 1), (8, ROWS_PER_REQUEST)):
            session.case(
                f"{name}, {requests * width} rows",
                _measure_sampling,
                setup,
                name,
                params,
                (requests, width),
                predicted,
            )


def _measure_sampling(
    setup: SamplingSetup,
    name: str,
    params: SamplingParams,
    sizes: tuple[int, int],
    predicted: tuple[float, float],
) -> None:
    """Measure the sampling kernels alone, and then with the verification of the drafts.

    `sizes` are the number of requests and the number of rows per request.
    """
    session = setup.session
    requests, width = sizes
    slots = setup.join(params)
    slots["draft_len"] = width - 1
    setup.state.copy_from(slots)
    count = 2 if session.small else 20
    num_rows = requests * width
    saved = session.device.from_host(setup.state.array.to_host())
    rows = setup.row_map(requests, width)
    logits = session.random_float32((num_rows, session.shape["vocab_size"]), 2.0)
    with session.timed_graph() as lane:
        for _ in range(count):
            setup.sampler.target.sample(lane, logits, rows)
    usable = int((setup.sampler.arrays.row_status.to_host()[:num_rows] == 1).sum())
    session.add(
        f"{name}, {num_rows} rows, {lane.kernels}",
        lane.seconds / count * 1e6,
        "us",
        predicted,
        f"{usable} rows usable",
    )
    with session.timed_graph() as lane:
        for _ in range(count):
            lane.copy(setup.state.array, saved)
            setup.sampler.target.sample(lane, logits, rows)
            setup.sampler.verifier.verify(lane, rows, setup.ring)
    session.add(f"{name}, {num_rows} rows, verified", lane.seconds / count * 1e6, "us")
