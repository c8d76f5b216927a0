"""Target rows, chain verification and draft sampling of a round."""

from __future__ import annotations

from graft.cudagraph.device import Device
from graft.cudagraph.errors import OptionError, ShapeError
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.cudagraph.pinned import PinnedSlots, Ring
from graft.sampling.checks import check_array, check_field, check_range
from graft.sampling.loading import load, row_block
from graft.sampling.state import SlotState

__all__ = ["Sampler"]

_FORCED_BLOCK = 64


class Sampler:
    """Writes the sampling kernels of a round on lanes.

    A round calls ``target``, ``verify`` and then ``draft`` for j = 1..K, each once per batch. The
    order of filters is vocabulary bound, mask, temperature, top-k, top-p, min-p, renormalise; ties
    go to the smaller id. A NaN or +inf logit at a legal id fails the row (reason error).

    Parameters
    ----------
    device : Device
    state : SlotState
        Per-slot state that the kernels read and advance.
    exchange : PinnedSlots
        Fields ``mask`` int32 [K+1, ceil(V/32)], ``row_state`` int32 [K+1, 4], ``committed`` int32
        [K+3] and ``drafted`` int32 [K+2], one row per slot.
    vocab_size : int
        V, columns of the target's logits, < 2**24.
    token_limit : int
        Ids at or above it are illegal, also on unconstrained rows.
    draft_length : int
        K.
    draft_vocab : int
        Vd, columns of the drafter's logits.
    d2t : DeviceArray or None
        int32 [Vd], target id of each drafter column; None when they are the same.
    t2d : DeviceArray or None
        int32 [V], drafter column of each target id or -1. Given exactly when ``d2t`` is.
    candidates : int, optional
        Ids per draft that the grammar is asked about before it is drawn, 0 to 64; then the exchange
        also has ``candidates`` int32 [3 + candidates] and ``answers`` int32 [4]. Default 0: drafts
        are drawn under mask rows.
    max_batch : int
        Most batch rows of a call.
    block : int, optional
        Threads per row; 1 or a multiple of 32 up to 1024. Default: what suits the device. Results
        do not depend on it.

    Attributes
    ----------
    probs : float32 [max_batch * (K+1), V]
        Filtered distribution of the sampled rows (those with temperature >= 1e-5) of the last call.
    target_tok, row_ok : int32 [max_batch * (K+1)]
        Greedy or coupled token; 1 usable, 0 not ready, 2 no legal token, 3 error.
    count, accepted, old_n : int32 [max_batch]
        Tokens committed, drafts among them, and the position of ``last`` before, by batch row.
    committed_tok : int32 [max_batch, K+1]
        The committed tokens by batch row; the first ``count`` are valid.

    Raises
    ------
    OptionError, ShapeError
        Naming the size or array that does not fit.
    """

    def __init__(
        self,
        device: Device,
        state: SlotState,
        exchange: PinnedSlots,
        *,
        vocab_size: int,
        token_limit: int,
        draft_length: int,
        draft_vocab: int,
        d2t: DeviceArray | None,
        t2d: DeviceArray | None,
        max_batch: int,
        candidates: int = 0,
        block: int | None = None,
    ) -> None:
        check_range("vocab_size", vocab_size, 1, (1 << 24) - 1)
        check_range("token_limit", token_limit, 1, vocab_size)
        check_range("max_batch", max_batch, 1, state.slots)
        if (draft_length, draft_vocab) != (state.draft_length, state.draft_vocab):
            raise OptionError(
                f"draft_length and draft_vocab are {draft_length} and {draft_vocab}, but the slot "
                f"state was made for {state.draft_length} and {state.draft_vocab}"
            )
        if (d2t is None) != (t2d is None):
            raise OptionError("d2t and t2d come together: give both or neither")
        sizes = {"Vd": draft_vocab, "V": vocab_size}
        if d2t is not None and t2d is not None:
            check_array("d2t", d2t, "int32", ("Vd",), sizes)
            check_array("t2d", t2d, "int32", ("V",), sizes)
        elif draft_length > 0 and draft_vocab > vocab_size:
            raise OptionError(f"draft_vocab {draft_vocab} exceeds vocab_size {vocab_size}")
        self._words = -(-vocab_size // 32)
        width = draft_length + 1
        check_field("exchange", exchange, "row_state", (width, 4))
        check_field("exchange", exchange, "committed", (width + 2,))
        check_field("exchange", exchange, "drafted", (width + 1,))
        check_range("candidates", candidates, 0, 64)
        if candidates > 0:
            check_field("exchange", exchange, "candidates", (3 + candidates,))
            check_field("exchange", exchange, "answers", (4,))
        mask = exchange.field("mask")
        if tuple(mask.shape) != (width, self._words) or exchange.slots < state.slots:
            raise ShapeError(
                f"exchange.mask: {exchange.slots} slots of {tuple(mask.shape)}, expected "
                f"S={state.slots} of [K+1={width}, ceil(V/32)={self._words}]"
            )

        self.device, self.state, self.exchange = device, state, exchange
        self.vocab_size, self.token_limit = vocab_size, token_limit
        self.draft_length, self.draft_vocab = draft_length, draft_vocab
        self.d2t, self.t2d, self.max_batch = d2t, t2d, max_batch
        self.most_candidates = candidates
        rows = max_batch * width
        self.probs = device.zeros((rows, vocab_size), "float32")
        self.target_tok = device.zeros((rows,), "int32")
        self.row_ok = device.zeros((rows,), "int32")
        self.count = device.zeros((max_batch,), "int32")
        self.accepted = device.zeros((max_batch,), "int32")
        self.old_n = device.zeros((max_batch,), "int32")
        self.committed_tok = device.zeros((max_batch, width), "int32")
        self._replay: DeviceArray | None = None
        self._block = row_block(device) if block is None else block
        self._target = load(device, "target", self._block)["sample_target"]
        verify = load(device, "verify", self._block)
        self._verify, self._publish = verify["verify_chain"], verify["publish_round"]
        self._draft = load(device, "draft", self._block)["sample_draft"]
        self._candidates = load(device, "candidates", self._block)["draft_candidates"]
        self._forced = load(device, "forced", self._block)["place_forced"]

    def target(self, lane: Lane, logits: DeviceArray, row_slot: DeviceArray, width: int) -> None:
        """Mask and filter the target's rows; decide the greedy or coupled token of each.

        Parameters
        ----------
        lane : Lane
        logits : float32 [B * width, V]
            Row ``b * width + j`` follows position ``n + j`` of slot ``row_slot[b]``.
        row_slot : int32 [B]
            Slot of each batch row, -1 for padding.
        width : int
            Rows per batch row, 1 <= width <= K+1.

        Raises
        ------
        OptionError, ShapeError
        """
        batch = self._batch(row_slot)
        check_range("width", width, 1, self.draft_length + 1)
        rows = {"B*width": batch * width, "V": self.vocab_size}
        check_array("logits", logits, "float32", ("B*width", "V"), rows)
        s, mask, state = self.state, self.exchange.field("mask"), self.exchange.field("row_state")
        lane.kernel(
            self._target,
            batch * width,
            self._block,
            [
                logits, self.vocab_size, self.token_limit, row_slot, width, s.n, s.draft_len,
                s.active, s.epoch, s.seed, s.sample, s.temperature, s.top_k, s.top_p, s.min_p,
                s.verify, mask, mask.stride, self._words, state, state.stride, self.probs,
                self.target_tok, self.row_ok,
            ],
            name="mask and sample targets",
        )  # fmt: skip

    def verify(
        self,
        lane: Lane,
        row_slot: DeviceArray,
        width: int,
        replay_ptr: DeviceArray,
        out_ring: Ring,
    ) -> None:
        """Walk the drafts, commit, write the output entry and publish its stamp.

        Parameters
        ----------
        lane : Lane
        row_slot : int32 [B]
        width : int
            As in ``target``.
        replay_ptr : int32 [1]
            Number of the replay, on the device.
        out_ring : Ring
            int32 fields ``slot``, ``count``, ``reason``, ``accepted``, ``draft_len`` [>= B] and
            ``tokens`` [>= B, >= K+1]; entry ``replay % entries`` is written.

        Raises
        ------
        OptionError, ShapeError
        """
        batch = self._batch(row_slot)
        check_range("width", width, 1, self.draft_length + 1)
        check_array("replay_ptr", replay_ptr, "int32", (1,), {})
        self._replay = replay_ptr
        outs: list[object] = []
        for name in ("slot", "count", "reason", "accepted", "draft_len"):
            check_field("out_ring", out_ring, name, (batch,))
            outs += [out_ring.field(name), out_ring.field(name).stride]
        check_field("out_ring", out_ring, "tokens", (batch, width))
        tokens = out_ring.field("tokens")
        s = self.state
        committed, drafted = self.exchange.field("committed"), self.exchange.field("drafted")
        lane.kernel(
            self._verify,
            batch,
            self._block,
            [
                row_slot, width, s.drafts.shape[1], self.vocab_size, self.draft_vocab, self.t2d,
                self.probs, self.target_tok, self.row_ok, s.n, s.last, s.drafts, s.draft_len,
                s.active, s.limit, s.stop_ids, s.stop_count, s.seed, s.sample, s.temperature,
                s.verify, s.q, s.q_kind, s.faults, replay_ptr, committed, committed.stride,
                drafted, drafted.stride, out_ring.entries, *outs, tokens, tokens.stride,
                tokens.shape[1], self.count, self.accepted, self.old_n, self.committed_tok,
                self.committed_tok.shape[1],
            ],
            name="verify",
        )  # fmt: skip
        slot, stamp = out_ring.field("slot"), out_ring.stamp
        lane.kernel(
            self._publish,
            1,
            1,
            [
                replay_ptr, out_ring.entries, batch, slot.shape[0], slot, slot.stride,
                stamp, stamp.stride,
            ],
            name="publish tokens",
        )  # fmt: skip

    def draft(
        self, lane: Lane, draft_logits: DeviceArray, row_slot: DeviceArray, j: int, masked: bool
    ) -> None:
        """Draw draft ``j`` of every slot that committed tokens in this replay and still drafts.

        Parameters
        ----------
        lane : Lane
        draft_logits : float32 [B, Vd]
        row_slot : int32 [B]
        j : int
            1 <= j <= K.
        masked : bool
            Apply the slot's mask row ``j - 1``; otherwise drafts may be illegal (and are refused
            by the next verification). With candidates the row counts only where there is no
            answer.

        Raises
        ------
        OptionError, ShapeError
            Also when ``verify`` was not yet written: it names the replay number.
        """
        batch = self._check_draft(draft_logits, row_slot, j)
        s, mask, state = self.state, self.exchange.field("mask"), self.exchange.field("row_state")
        drafted = self.exchange.field("drafted")
        answers = self.exchange.field("answers") if masked and self.most_candidates else None
        lane.kernel(
            self._draft,
            batch,
            self._block,
            [
                draft_logits, self.draft_vocab, self.token_limit, self.d2t, row_slot, j,
                int(masked), s.drafts.shape[1], self.count, s.n, s.drafts, s.draft_len, s.active,
                s.epoch, s.limit, s.stop_ids, s.stop_count, s.seed, s.sample, s.temperature,
                s.top_k, s.top_p, s.min_p, s.verify, s.q, s.q_kind, mask, mask.stride, self._words,
                state, state.stride, self._replay, drafted, drafted.stride,
                answers, 0 if answers is None else answers.stride,
            ],
            name=f"draft {j}",
        )  # fmt: skip

    def candidates(
        self, lane: Lane, draft_logits: DeviceArray, row_slot: DeviceArray, j: int
    ) -> None:
        """Write what the grammar is to test for draft ``j``, before ``draft`` takes the answer.

        Parameters
        ----------
        lane, draft_logits, row_slot, j
            As in ``draft``.

        Raises
        ------
        OptionError, ShapeError
            Also when the sampler was made without candidates.
        """
        if self.most_candidates == 0:
            raise OptionError("the sampler was made without candidates")
        batch = self._check_draft(draft_logits, row_slot, j)
        s, state = self.state, self.exchange.field("row_state")
        ids = self.exchange.field("candidates")
        lane.kernel(
            self._candidates,
            batch,
            self._block,
            [
                draft_logits, self.draft_vocab, self.token_limit, self.d2t, row_slot, j,
                s.drafts.shape[1], self.count, s.n, s.drafts, s.draft_len, s.active, s.epoch,
                s.limit, s.stop_ids, s.stop_count, s.seed, s.sample, s.temperature, s.top_k,
                s.top_p, s.min_p, s.verify, s.q, state, state.stride, self._replay,
                self.most_candidates, ids, ids.stride,
            ],
            name=f"candidates {j}",
        )  # fmt: skip

    def _check_draft(self, draft_logits: DeviceArray, row_slot: DeviceArray, j: int) -> int:
        batch = self._batch(row_slot)
        check_range("j", j, 1, self.draft_length)
        check_array(
            "draft_logits", draft_logits, "float32", ("B", "Vd"),
            {"B": batch, "Vd": self.draft_vocab},
        )  # fmt: skip
        if self._replay is None:
            raise OptionError("draft comes after verify in a round; verify was not written yet")
        return batch

    def forced(self, lane: Lane, row_slot: DeviceArray) -> None:
        """Draft the tokens that mask rows 0, 1, .. force, for slots as in ``draft``: no drafter.

        Parameters
        ----------
        lane : Lane
        row_slot : int32 [B]

        Raises
        ------
        OptionError, ShapeError
            Also when ``verify`` was not yet written: it names the replay number.
        """
        batch = self._batch(row_slot)
        if self._replay is None:
            raise OptionError("drafts come after verify in a round; verify was not written yet")
        s, state = self.state, self.exchange.field("row_state")
        drafted = self.exchange.field("drafted")
        lane.kernel(
            self._forced,
            -(-batch // _FORCED_BLOCK),
            _FORCED_BLOCK,
            [
                batch, row_slot, self.draft_length, s.drafts.shape[1], self.count, s.n, s.drafts,
                s.draft_len, s.active, s.epoch, s.limit, s.stop_ids, s.stop_count, s.q_kind, state,
                state.stride, self._replay, drafted, drafted.stride,
            ],
            name="forced drafts",
        )  # fmt: skip

    def _batch(self, row_slot: DeviceArray) -> int:
        """Check the row map and return its length."""
        batch = row_slot.shape[0] if len(row_slot.shape) == 1 else -1
        check_array("row_slot", row_slot, "int32", ("B",), {"B": batch})
        check_range("batch rows B", batch, 1, self.max_batch)
        return int(batch)
